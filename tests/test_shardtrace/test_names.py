from shardtrace.names import places, repeated_blocks

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
