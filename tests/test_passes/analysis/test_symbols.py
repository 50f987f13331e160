"""The table of symbols against other facts about all of Thunder's symbols: names, tags, and torch's operators."""

from passes.analysis.flops import FLOPS
from passes.analysis.recognise import TABLE, differentiated_as, identity, is_foreign, properties
from passes.comm import symbols as ours
from passes.comm.symbols import Property
from passes.kernels import executor as kernels

import pytest
import thunder.torch as ltorch
import torch
from thunder.core import prims
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.symbol import Symbol
from thunder.executors import pythonex, sdpaex, torchex
from thunder.extend import OperatorExecutor


def _all_symbols():
    """Prims, torch functions, and the operators of the executors that are always there."""
    places = (vars(prims), vars(ltorch), ltorch._torch_to_thunder_function_map)
    executors = (torchex.ex, pythonex.ex, sdpaex.sdpa_ex, kernels)
    found = [s for place in (*places, *(ex.opmap for ex in executors)) for s in place.values() if isinstance(s, Symbol)]
    return list({(s.id, s.name, s.executor): s for s in found}.values())


SYMBOLS = _all_symbols()


def where(condition):
    """The ids of symbols, with the executor's name for operators."""
    return {f"{s.executor.name if s.executor else ''}:{s.id}" for s in SYMBOLS if condition(s)}


def overloads(sym):
    """PyTorch's operators for the function of a symbol."""
    function = identity(sym)
    packet = getattr(torch.ops.aten, function.split(".")[-1], None) if isinstance(function, str) else None
    return [getattr(packet, name) for name in packet.overloads()] if packet is not None else []


def test_all_symbols_are_there():
    assert len(SYMBOLS) > 2000


def test_each_id_is_that_of_a_symbol():
    """FLOPS also has symbols of executors that need a GPU."""
    known = {identity(s) for s in SYMBOLS}
    assert TABLE.keys() - known == set()
    gpu = {f"{kernel}_{way}" for kernel in ("cudnn_sdpa", "nv_sdpfa", "fa3") for way in ("fwd", "bwd")}
    assert FLOPS.keys() - known == gpu


# Names of symbols by property. Each symbol of such a name has the property.
SHAPES = "broadcast_in_dim expand flatten reshape squeeze unsqueeze view torch_prims_reshape_impl"
SLICES = "chunk narrow select slice_prim split unbind torch_slice_prim_impl"
NAMES = {
    Property.VIEW: f"{SHAPES} {SLICES} diagonal movedim permute shallow_copy tensor_split transpose t unfold "
    "update_aliases view_as atleast_1d atleast_2d atleast_3d",
    Property.INDEX: "getitem __getitem__",
    Property.CAST: "to convert_element_type bfloat16 half",
    Property.COPY: "contiguous",
    Property.LOOK_UP: "embedding gather index_select take take_along_axis take_along_dim",
    Property.CONSTANT: "arange iota full zeros ones tensor_from_sequence",
    Property.FREE: "python_del python_return unpack_trivial unpack_sequence clear_mutable_collection comment sink shape",
    Property.IN_PLACE: "copy_",
}


@pytest.mark.parametrize("expected", NAMES, ids=str)
def test_names(expected):
    assert where(lambda s: s.name in NAMES[expected].split() and expected not in properties(s)) == set()


@pytest.mark.parametrize("expected", [Property.RANDOM, Property.IN_PLACE], ids=str)
def test_tags_of_thunder(expected):
    tag = OpTags.RANDOM_OP if expected is Property.RANDOM else OpTags.IN_PLACE
    assert where(lambda s: tag in (s.tags or ()) and expected not in properties(s)) == set()


def test_views_of_thunder():
    views = ltorch._syms_returning_views | ltorch._syms_that_may_return_views
    assert where(lambda s: s in views and not properties(s).is_alias) == set()


def test_views_of_torch():
    """An operator's schema says whether its result may alias an argument that it does not write to."""

    def is_view(sym):
        results = [r.alias_info for overload in overloads(sym) for r in overload._schema.returns]
        return any(alias is not None and not alias.is_write for alias in results)

    assert where(lambda s: is_view(s) and not properties(s).is_alias) == set()


def is_seeded(sym):
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads(sym))


DRAW_NOTHING = {"torch_kernels:kernels.dropout"}  # its random numbers are those of a dropout_mask


def test_random_operators_of_torch():
    assert where(lambda s: is_seeded(s) and Property.RANDOM not in properties(s)) == DRAW_NOTHING


# Random symbols that are not torch operators of the same name: prims, Python functions, operators of executors.
OTHER_RANDOM = {
    *(PrimIDs.GET_AND_UPDATE_RNG_STATE, PrimIDs.MULTINOMIAL, PrimIDs.RANDINT, PrimIDs.RANDN, PrimIDs.UNIFORM),
    *("torch._native_multi_head_attention", "torch.uniform_like", "get_and_update_rng_state_impl"),
    *(f"torch.nn.functional.dropout{n}d" for n in (1, 2, 3)),
    *(f"torch.nn.functional.fractional_max_pool{n}d" for n in (2, 3)),
    *(f"torch.nn.functional.fractional_max_pool{n}d_with_indices" for n in (2, 3)),
    *("torch.nn.functional.gumbel_softmax", "torch.nn.functional.multi_head_attention_forward", "torch.lobpcg"),
    *(sdpaex.sdpea_gradfwd.id, sdpaex.sdpfa_gradfwd.id, "kernels.dropout_mask"),
}


def test_other_random_symbols():
    assert {identity(s) for s in SYMBOLS if Property.RANDOM in properties(s) and not is_seeded(s)} == OTHER_RANDOM


NAMES_OF_RANDOM = "rand uniform multinomial bernoulli dropout philox normal_ rrelu gumbel fractional_max_pool"
NAMES_OF_RANDOM += " multi_head_attention scaled_dot_product sdpa"


def test_names_of_random_symbols():
    """Symbols with random-sounding names that give the same numbers each time, from a seed and an offset."""
    same = where(
        lambda s: (
            any(name in s.name for name in NAMES_OF_RANDOM.split())
            and Property.RANDOM not in properties(s) | TABLE.get(differentiated_as(s), Property.NONE)
        )
    )
    philox = {f":{PrimIDs.UNIFORM_PHILOX}", ":torch.uniform_philox", "torch:ops.rngprims.philox_rand"}
    backward = {f"sdpa:{sdpaex.sdpea_bwd.id}", f"sdpa:{sdpaex.sdpfa_bwd.id}"}
    assert same == philox | backward | DRAW_NOTHING


def test_operators_stand_for_torch_functions():
    assert {s.id for s in SYMBOLS if is_foreign(s)} <= {
        *("dtensor.torch.from_local", "dtensor.torch.redistribute", "dtensor.torch.to_local"),
        "torch.ops.higher_order.autograd_function_apply",
    }
    narrow, narrow_vjp = torchex.ex.opmap["narrow"], torchex.ex.opmap["narrow_vjp"]
    assert (identity(narrow), identity(torchex.ex.opmap["as_strided"])) == ("torch.narrow", "Tensor.as_strided")
    assert (differentiated_as(narrow_vjp), differentiated_as(narrow)) == ("torch.narrow", None)
    assert (identity(torchex.permute), identity(torchex.copy_)) == ("torch.permute", PrimIDs.COPY_)


def test_operators_of_users():
    """An operator that is like a symbol has its properties. Its own name tells nothing."""
    executor = OperatorExecutor("test_symbols")
    like = executor.register_operator("mine", like=ltorch.reshape, fn=torch.reshape)
    alone = executor.register_operator("reshape", meta=lambda x: x, fn=torch.clone)
    assert (properties(like), properties(alone)) == (Property.VIEW, Property.NONE)
    assert (is_foreign(like), is_foreign(alone)) == (False, True)


def test_symbols_of_ours():
    of_collectives = [s for collective in ours.BUCKETS for s in (collective.issue, collective.wait)]
    made = [*of_collectives, *(s for s in vars(ours).values() if getattr(s, "executor", 0) is ours.executor)]
    assert len(made) >= 17
    assert {s.name: properties(s) for s in made if properties(s) is not Property.FREE} == {
        "replicated": Property.CAST,
        "accumulate": Property.STATEFUL,
        "accumulated": Property.STATEFUL,
        "keep_shards": Property.PARTS,
    }
