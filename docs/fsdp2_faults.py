"""Prints how PyTorch's FSDP2 behaves under faults, for the table in docs/guide/troubleshooting.md.

    python docs/fsdp2_faults.py [CASE ...]

Each case runs on two gloo ranks, and the outcome of each rank is printed. A rank hangs if it has not ended ``PATIENCE``
seconds after both have started.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

PATIENCE = 40.0
CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def rank() -> int:
    return dist.get_rank()


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, **options)
    return fully_shard(model, **options)


def step(model: nn.Module, *inputs: torch.Tensor) -> None:
    model(*inputs).sum().backward()


def linear(*sizes: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


@case
def hidden_size_differs() -> None:
    step(sharded(linear(4, 8 + 8 * rank(), 4)), torch.ones(2, 4))


@case
def same_numel_other_shape() -> Any:
    model = sharded(linear(*((4, 8) if rank() == 0 else (8, 4))))
    step(model, torch.ones(2, 4 + 4 * rank()))
    return "stepped"


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, first: str = "left", both: bool = True) -> torch.Tensor:
        a, b = (self.left, self.right) if first == "left" else (self.right, self.left)
        return b(a(x)) if both else a(x)


@case
def another_order() -> Any:
    model = sharded(Branches())
    model(torch.ones(2, 4), "left" if rank() == 0 else "right").sum().backward()
    return "stepped"


@case
def another_depth() -> Any:
    step(sharded(linear(*([4] * (3 + rank())))), torch.ones(2, 4))
    return "stepped"


@case
def unused_on_one_rank() -> Any:
    model(torch.ones(2, 4), both=rank() == 0).sum().backward() if (model := sharded(Branches())) else None
    return "stepped"


@case
def dtype_differs() -> Any:
    model = linear(4, 4)
    step(
        sharded(model.to(torch.float32 if rank() == 0 else torch.bfloat16)), torch.ones(2, 4).to(model[0].weight.dtype)
    )
    return "stepped"


@case
def killed_in_a_step() -> None:
    model = sharded(linear(4, 4))
    step(model, torch.ones(2, 4))
    if rank() == 1:
        os.kill(os.getpid(), 9)
    step(model, torch.ones(2, 4))


@case
def exception_on_one_rank() -> None:
    model = sharded(linear(4, 4))
    step(model, torch.ones(2, 4))
    step(model, torch.ones(2, 4 + rank()))


def leaves_a_step(fails: bool) -> str:
    """Rank 1 leaves the second batch: by an error that its script catches, or by skipping backward."""
    model = sharded(nn.Sequential(nn.Embedding(4, 4), *linear(4, 4, 4, 4)))
    seen = []
    for batch in range(3):
        leaves = batch == 1 and rank() == 1
        model.zero_grad()
        try:
            loss = model(torch.full((2,), 9 if leaves and fails else 1)).square().sum()
        except IndexError:
            continue
        if not leaves:
            loss.backward()
            seen.append([p.grad.to_local().clone() for p in model.parameters()])
    same = all(torch.allclose(a, b) for a, b in zip(seen[0], seen[-1], strict=True))
    return f"stepped, with {'right' if same else 'wrong'} numbers"  # batches are equal, and no parameter is updated


@case
def backward_skipped_on_one_rank() -> Any:
    return leaves_a_step(fails=False)


@case
def batch_given_up_on_one_rank() -> Any:
    return leaves_a_step(fails=True)


@case
def flipped_bit() -> Any:
    model = sharded(linear(64, 64))
    path = shared("checkpoint")
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)
    if rank() == 0:
        name = next(f for f in sorted(os.listdir(path)) if f.endswith(".distcp"))
        with open(os.path.join(path, name), "r+b") as file:
            middle = os.path.getsize(file.name) // 2
            file.seek(middle)
            (byte,) = file.read(1)
            file.seek(middle)
            file.write(bytes([byte ^ 64]))
    dist.barrier()
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=path)
    return "loaded without an error"


@case
def wrong_dtype() -> Any:
    path = shared("checkpoint")
    dcp.save({"model": get_model_state_dict(sharded(linear(4, 4).bfloat16()))}, checkpoint_id=path)
    dcp.load({"model": get_model_state_dict(sharded(linear(4, 4)))}, checkpoint_id=path)
    return "loaded without an error"


class Payload:
    def __reduce__(self) -> Any:
        return print, (f"rank {os.environ['RANK']}: the payload ran",)


@case
def malicious_checkpoint() -> Any:
    import pickle

    path = shared("checkpoint")
    state = {"model": get_model_state_dict(sharded(linear(4, 4)))}
    dcp.save(state, checkpoint_id=path)
    if rank() == 0:
        with open(os.path.join(path, ".metadata"), "wb") as file:
            pickle.dump(Payload(), file)
    dist.barrier()
    dcp.load(state, checkpoint_id=path)


@case
def zero_size_parameter() -> Any:
    model = linear(4, 4)
    model.nothing = nn.Parameter(torch.zeros(0, 4))
    fully_shard(model)
    step(model, torch.ones(2, 4))
    return f"stepped; gradient of the parameter: {model.nothing.grad}"


@case
def scalar_parameter() -> Any:
    model = linear(4, 4)
    model.scale = nn.Parameter(torch.tensor(1.0))
    fully_shard(model)


@case
def non_contiguous_parameter() -> Any:
    model = linear(4, 4)
    model.turned = nn.Parameter(torch.randn(4, 6).t())
    fully_shard(model)


@case
def mixed_dtypes() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())
    fully_shard(model)
    model(torch.ones(2, 4))


@case
def unfrozen() -> Any:
    model = sharded(linear(4, 4, 4))
    model[0].requires_grad_(False)
    step(model, torch.ones(2, 4))
    model[0].requires_grad_(True)
    step(model, torch.ones(2, 4))
    return f"gradient: {model[0].weight.grad is not None}"


@case
def overflow_on_one_rank() -> Any:
    model = sharded(linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = model[0].weight.full_tensor().clone()
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    if rank() == 1:
        model[0].weight.grad.to_local()[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    return f"stepped: {not torch.equal(model[0].weight.full_tensor(), before)}, scale {scaler.get_scale()}"


@case
def batch_norm_buffers() -> Any:
    model = sharded(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model(torch.randn(8, 4) + rank()).sum().backward()
    return f"running mean {model[1].running_mean[0].item():.3f}"


@case
def optimizer_built_before() -> Any:
    model = linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sharded(model)
    before = model[0].weight.full_tensor().clone()
    step(model, torch.ones(2, 4))
    optimizer.step()
    return f"the optimizer changed the model: {not torch.equal(model[0].weight.full_tensor(), before)}"


@case
def converted_after_a_step() -> Any:
    model = sharded(linear(4, 4))
    step(model, torch.ones(2, 4))
    model.to(torch.bfloat16)
    step(model, torch.ones(2, 4).bfloat16())
    return f"stepped, gradient in {model[0].weight.grad.dtype}"


@case
def module_replaced_after_sharding() -> Any:
    model = sharded(linear(4, 4, 4))
    torch.manual_seed(0)
    model[1] = nn.Linear(4, 4)
    step(model, torch.ones(2, 4) * (1 + rank()))
    return f"stepped; gradient of the new module {model[1].weight.grad.sum().item():.3f}"


def optimizer_case(build: Callable[[Any], torch.optim.Optimizer]) -> str:
    """Whether a step on shards equals that of a single process with the same batch."""
    whole, model = linear(8, 8), sharded(linear(8, 8))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    for m in (whole, model):
        optimizer = build([m[0].weight])

        def closure(m: nn.Module = m) -> Any:
            m.zero_grad()
            loss = m(x).square().mean()
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)
    return f"off by {(model[0].weight.full_tensor() - whole[0].weight).abs().max().item():.1e}"


@case
def muon() -> Any:
    return optimizer_case(lambda parameters: torch.optim.Muon(parameters, lr=0.1))


@case
def adafactor() -> Any:
    return optimizer_case(lambda parameters: torch.optim.Adafactor(parameters, lr=0.1))


@case
def lbfgs() -> Any:
    return optimizer_case(lambda parameters: torch.optim.LBFGS(parameters, lr=0.1))


@case
def gradient_penalty() -> Any:
    model = sharded(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))
    x = torch.ones(2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return f"gradient of the penalty: {model[0].weight.grad is not None}"


@case
def sparse_embedding() -> Any:
    step(sharded(nn.Sequential(nn.Embedding(4, 4, sparse=True))), torch.tensor([1, 2]))
    return "stepped"


@case
def batch_norm_in_bf16() -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    step(sharded(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), mp_policy=policy), torch.ones(8, 4))
    return "stepped"


@case
def shared_storage() -> Any:
    model = linear(4, 4, 4)
    model[1].weight = nn.Parameter(model[0].weight.data)
    sharded(model)
    step(model, torch.ones(2, 4))
    with torch.no_grad():
        model[0].weight.zero_()
    return f"still tied: {not model[1].weight.full_tensor().any()}"


@case
def frozen_while_accumulating() -> Any:
    model = sharded(linear(4, 4, 4))
    model.set_requires_gradient_sync(False)
    step(model, torch.ones(2, 4))
    model.set_requires_gradient_sync(True)
    model[0].requires_grad_(False)
    step(model, torch.ones(2, 4))
    return f"stepped; gradient of the frozen layer: {model[0].weight.grad is not None}"


def shared(name: str) -> str:
    return os.path.join(os.environ["DIRECTORY"], name)


def _run(name: str, number: int, directory: str, outcomes: Any, ready: Any) -> None:
    os.environ |= {"RANK": str(number), "DIRECTORY": directory}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=number, world_size=2, timeout=timedelta(seconds=600)
    )
    dist.barrier()
    ready.set()
    try:
        outcomes.put((number, f"{CASES[name]()}"))
    except Exception as error:
        outcomes.put((number, f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"))
    outcomes.close()
    outcomes.join_thread()
    os._exit(0)


def main() -> None:
    context = multiprocessing.get_context("spawn")
    for name in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as directory:
            outcomes = context.Queue()
            ready = context.Event()
            ranks = [context.Process(target=_run, args=(name, n, directory, outcomes, ready)) for n in range(2)]
            for process in ranks:
                process.start()
            ready.wait()
            deadline = time.monotonic() + PATIENCE
            for process in ranks:
                process.join(max(0.1, deadline - time.monotonic()))
            said = {}
            while not outcomes.empty():
                number, text = outcomes.get()
                said[number] = text
            for number, process in enumerate(ranks):
                ended = "hangs" if process.is_alive() else f"ended with {process.exitcode}"
                print(f"{name}, rank {number}: {said.get(number, ended)}", flush=True)
                process.kill()
                process.join()


if __name__ == "__main__":
    main()
