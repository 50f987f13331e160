"""A forward that draws from generators outside of torch, or sets one of torch, is an error; in a submodule, PyTorch runs
it, and each number is eager's."""

import functools
import random

import shardtrace
from shardtrace.record.watcher import RandomStates

import numpy
import pytest
import torch
from torch import nn

RNG = random.Random(3)
# names of one state each with another one that a forward reaches: they make no difference
CHOICES, RAND = random.choices, numpy.random.rand
GENERATOR = numpy.random.default_rng(0)
BITS = GENERATOR.bit_generator


def restored(m, x):
    state = m.generator.get_state()
    noise = torch.randn(4, generator=m.generator)
    m.generator.set_state(state)
    return x + noise - torch.randn(4, generator=m.generator)


def globally_restored(m, x):
    state = torch.get_rng_state()
    noise = torch.randn(4)
    torch.set_rng_state(state)
    return x + noise - torch.randn(4)


def forked(m, x):
    with torch.random.fork_rng():
        noise = torch.randn(4)
    return x + noise + torch.randn(4)


def seeded(m, x):
    m.generator.manual_seed(1)  # the state that it has already
    return x + torch.randn(4, generator=m.generator)


def seeded_at_the_end(m, x):
    y = x + torch.randn(4)
    torch.manual_seed(2)
    return y


SETS = {
    "Part.generator": [restored, seeded],
    "torch's own generator": [globally_restored, forked, seeded_at_the_end],
    "random": [lambda m, x: x * random.random()],
    "numpy.random": [lambda m, x: x * float(numpy.random.rand())],
    "Part.held[1]": [lambda m, x: x * m.held[1].random()],
    "Part.numpy": [lambda m, x: x * float(m.numpy.random())],
    "Part.state": [lambda m, x: x * float(m.state.rand())],
    "Part.draw": [lambda m, x: x if m.draw() < 0.5 else -x],
    f"global {__name__}.RNG": [lambda m, x: x * RNG.random()],
}
CASES = [(forward, name) for name, forwards in SETS.items() for forward in forwards]


class Part(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.how, self.fc, self.generator = forward, nn.Linear(4, 4), torch.Generator().manual_seed(1)
        self.held, self.numpy = (1, random.Random(3)), numpy.random.default_rng(3)
        self.state, self.draw = numpy.random.RandomState(3), functools.partial(random.Random(4).uniform, 0, 1)

    def forward(self, x):
        return self.how(self, self.fc(x))


def run(model, steps=3):
    for seed in (random.seed, numpy.random.seed, torch.manual_seed, RNG.seed):
        seed(5)
    found = [model(torch.ones(2, 4)).detach() for _ in range(steps)]
    return torch.cat(
        [*found, torch.rand(1, 4), torch.full((1, 4), random.random() + numpy.random.rand() + RNG.random())]
    )


def build(make, sharded):
    torch.manual_seed(0)
    return shardtrace.fsdp(make()) if sharded else make()


@pytest.mark.parametrize(("forward", "name"), CASES, ids=[name for _, name in CASES])
def test_an_error_in_the_model(single_rank, forward, name):
    policy = shardtrace.CompilePolicy(eager=None)
    with pytest.raises(RuntimeError, match=r"forward (draws numbers|seeds)") as error:
        run(shardtrace.fsdp(Part(forward), compile_policy=policy))
    assert name in str(error.value)


@pytest.mark.parametrize(("forward", "name"), CASES[1::3], ids=[name for _, name in CASES[1::3]])
def test_right_in_the_model_itself(single_rank, forward, name):
    eager, ours = (run(build(lambda: Part(forward), sharded)) for sharded in (0, 1))
    torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize(("forward", "name"), CASES[::3], ids=[name for _, name in CASES[::3]])
def test_right_in_a_submodule(single_rank, forward, name):
    eager, ours = (run(build(lambda: nn.Sequential(nn.Linear(4, 4), Part(forward)), sharded)) for sharded in (0, 1))
    torch.testing.assert_close(ours, eager)


def no_draw_in_a_fork(m, x):
    with torch.random.fork_rng():
        x = x + 1
    return x + torch.rand(4)


@pytest.mark.parametrize("forward", [lambda m, x: x + torch.randn(4, generator=m.generator), no_draw_in_a_fork])
def test_plain_draws_are_right(single_rank, forward):
    eager, ours = (run(build(lambda: Part(forward), sharded)) for sharded in (0, 1))
    torch.testing.assert_close(ours, eager)


def test_a_generator_among_the_arguments(single_rank):
    class Given(Part):
        def forward(self, x, rng):
            return self.fc(x) * rng["a"].random()

    with pytest.raises(RuntimeError, match=r"draws numbers from arguments\[0\]\[1\]\['a'\]"):
        build(lambda: Given(None), True)(torch.ones(2, 4), {"a": random.Random(1)})


def test_all_is_put_back():
    mine, numpys, bits = random.Random(1), numpy.random.default_rng(1), numpy.random.PCG64(1)
    sources = torch.default_generator, torch.Generator()

    def states():
        own = [mine.getstate(), random.getstate(), numpys.bit_generator.state, bits.state]
        return own, numpy.random.get_state()[1].tolist(), [g.get_state().tolist() for g in sources]

    before = states()
    with RandomStates([("a", mine), ("b", numpys), ("c", bits), ("d", sources[1])]):
        torch.rand(2)
        sources[1].seed()
        mine.random() + numpys.random() + bits.random_raw() + numpy.random.rand() + random.random()
    assert states() == before
