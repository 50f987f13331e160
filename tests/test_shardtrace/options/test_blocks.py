from shardtrace.model.shards import places
from shardtrace.options.strategy import checkpointed_blocks, repeated_blocks

import pytest
from torch import nn


def linear():
    return nn.Linear(2, 2)


def test_module_lists_hold_blocks():
    model = nn.ModuleDict({"embed": linear()})
    model = nn.Sequential()
    model.add_module("h", nn.ModuleList([nn.Sequential(linear(), linear()), linear()]))
    assert repeated_blocks(model) == ["h.0", "h.1"]


def test_a_sequential_holds_blocks_if_two_are_alike():
    assert repeated_blocks(nn.Sequential(linear(), nn.Tanh(), linear())) == ["0", "1", "2"]
    assert repeated_blocks(nn.Sequential(linear(), nn.BatchNorm1d(2))) == []


def test_blocks_inside_a_sequential_that_is_none():
    blocks = nn.Sequential(nn.Sequential(linear(), nn.ReLU()), nn.Sequential(linear(), nn.ReLU()))
    assert repeated_blocks(nn.Sequential(nn.Embedding(2, 2), blocks, nn.LayerNorm(2))) == ["1.0", "1.1"]


def test_a_dict_of_unlike_parts_as_in_nanogpt():
    parts = {"wte": nn.Embedding(2, 2), "wpe": nn.Embedding(2, 2), "h": nn.ModuleList([linear(), linear()])}
    model = nn.ModuleDict({"transformer": nn.ModuleDict({**parts, "ln_f": nn.LayerNorm(2)})})
    assert repeated_blocks(model) == ["transformer.h.0", "transformer.h.1"]


def test_stages_of_blocks():
    stages = nn.ModuleList([nn.Sequential(Mlp(), Mlp()), nn.Sequential(Mlp(), Mlp())])
    assert repeated_blocks(stages) == ["0.0", "0.1", "1.0", "1.1"]


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(linear(), nn.ReLU(), linear())


def test_a_parameter_has_one_place_and_all_its_owners():
    model = nn.Sequential(nn.Embedding(3, 2), nn.ModuleList([linear()]), nn.Linear(2, 3))
    model[2].weight = model[0].weight
    found = {
        p.name: (p.layer, p.block, len(p.owners)) for p in places(model, {id(model[2].bias)}, repeated_blocks(model))
    }
    assert found == {
        "0.weight": ("0", None, 2),
        "1.0.weight": ("1.0", "1.0", 1),
        "1.0.bias": ("1.0", "1.0", 1),
    }


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, []),
        (False, []),
        (True, ["h.0", "h.1", "h.2"]),
        (2, ["h.1"]),
        (nn.ReLU, ["act"]),
        ((nn.ReLU, nn.ModuleList), ["h", "act"]),
        (lambda module: isinstance(module, nn.ReLU), ["act"]),
        (lambda name, module: name.endswith("2"), ["h.2"]),
    ],
)
def test_checkpointed_blocks(chosen, names):
    model = nn.ModuleDict({"h": nn.ModuleList([linear(), linear(), linear()]), "act": nn.ReLU()})
    assert list(checkpointed_blocks(model, chosen)) == names


@pytest.mark.parametrize("chosen", [4, nn.Conv2d, lambda module: False])
def test_no_block_is_chosen(chosen):
    with pytest.raises(ValueError, match=r"ModuleDict has no module that activation_checkpointing=.* chooses"):
        checkpointed_blocks(nn.ModuleDict({"h": nn.ModuleList([linear(), linear(), linear()])}), chosen)


@pytest.mark.parametrize("chosen", [0, -1, 1.5, "Block", [], int])
def test_what_chooses_no_blocks(chosen):
    with pytest.raises(ValueError, match="pass the class of a block"):
        checkpointed_blocks(linear(), chosen)


def test_a_block_with_a_forward_of_its_own():
    model = nn.ModuleList([linear()])
    model[0].forward = lambda x: x
    with pytest.raises(ValueError, match="module 0 has a forward set on the instance"):
        checkpointed_blocks(model, nn.Linear)
