"""A museum of silent bugs: each is built again as one wrong line in a step of shardtrace, and given to the proof.

    python examples/museum.py                        the verdicts, on ranks that do not exist
    torchrun --nproc_per_node=2 examples/museum.py   also what two ranks compute, beside eager PyTorch

None of these bugs raises an error when it runs. The exit status is 1 if one of them is called proven. docs/museum.md
tells who reported them, and what the numbers were.
"""

import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any
from unittest import mock

import shardtrace  # before thunder: makes it importable on the newest torch
from passes import Bucket, PassAfterLowering, pipeline
from passes.analysis.dims import torch_line
from passes.analysis.recognise import bucket_of, is_deletion
from passes.comm import sequence
from passes.kernels.torch_call import call_of
from passes.plan.plan import Split
from passes.proof.parts import printed
from shardtrace.testing import fake_ranks

import thunder
import torch
import torch.distributed as dist
from thunder.core.langctxs import Languages, langctx
from thunder.core.proxies import Proxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.torch import arange, cross_entropy, scaled_dot_product_attention
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import common

POSITIONS, WIDTH, HEADS, WORDS = 8, 8, 2, 16


class Model(nn.Module):
    """A small language model: attention, two experts, a head that is tied to the embedding."""

    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self.smoothing = smoothing
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.qkv, self.gate = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        rows, positions = tokens.shape
        x = self.embed(tokens) + self.places(torch.arange(positions))
        q, k, v = (y.view(rows, positions, HEADS, -1).transpose(1, 2) for y in self.qkv(x).split(WIDTH, 2))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        one, other = self.gate(x).softmax(2).split(1, 2)
        x = x + one * self.experts[0](x) + other * self.experts[1](x)
        x = x - x.mean(1, keepdim=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), label_smoothing=self.smoothing)


def batch(rank: int) -> tuple[Tensor, Tensor]:
    """The tokens and labels of a rank. Only the first ``2 + 4 * rank`` labels of row 0 count, and 7 of row 1."""
    tokens = torch.randint(WORDS, (2, POSITIONS), generator=torch.Generator().manual_seed(rank))
    labels = tokens.roll(-1, 1)
    labels[:, -1], labels[0, 2 + 4 * rank :] = -100, -100
    return tokens, labels


# ---- the exhibits ----

Wrong = Callable[[BoundSymbol], BoundSymbol | Proxy | None]


@dataclass
class Exhibit:
    """A bug. ``wrong(line)`` is the line, or the value, that stands in the place of a line; None: the line stays.

    ``within``: the pass of shardtrace that writes the wrong line; empty: a pass of the user's, after all others.
    ``mesh``: the names of its dimensions; none: all ranks hold shards, and each has its own batch.
    """

    name: str
    report: str
    wrong: Wrong
    within: str = ""
    mesh: tuple[str, ...] = ()
    smoothing: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def shares_sequences(self) -> bool:
        return "context" in self.mesh


EXHIBITS: list[Exhibit] = []


def exhibit(name: str, report: str, **options: Any) -> Callable[[Wrong], Wrong]:
    def add(wrong: Wrong) -> Wrong:
        EXHIBITS.append(Exhibit(name, f"https://github.com/{report}", wrong, **options))
        return wrong

    return add


def summed(line: BoundSymbol) -> BoundSymbol:
    """A reduction whose bucket adds gradients up instead of averaging them."""
    old = bucket_of(line)
    plan = replace(old.plan, divide_by=1.0)
    new = SUMMED.setdefault(old, Bucket(old.label, f"{old.name}_divided_by_1", plan, old.members, old.dtype))
    return line.from_bsym(args=(line.args[0], new))


SUMMED: dict[Bucket, Bucket] = {}


@exhibit(
    "hybrid sharding: gradients are summed over the replicas, not averaged",
    "pytorch/torchtitan/issues/2318", mesh=("replicate", "shard"), options={"sharding_strategy": "hybrid_zero3"},
)  # fmt: skip
def replicas(line: BoundSymbol) -> BoundSymbol | None:
    return summed(line) if line.sym.name in ("all_reduce", "wait_all_reduce") else None


@exhibit(
    "experts: their gradients are divided by the ranks of another group",
    "pytorch/pytorch/issues/160285", options={"bucketing_strategy": "layer"},
)  # fmt: skip
def experts(line: BoundSymbol) -> BoundSymbol | None:
    reduces = line.sym.name in ("reduce_scatter", "wait_reduce_scatter")
    return summed(line) if reduces and bucket_of(line).label.startswith("experts") else None


@exhibit("tied weights: the gradient of one use is lost", "pytorch/pytorch/issues/176076")
def tied(line: BoundSymbol) -> Proxy | None:
    """Only the head and the embedding have gradients of this shape."""
    of_words = tuple(getattr(line.output, "shape", ())) == (WORDS, WIDTH)
    return line.args[0] if line.sym.name == "add" and of_words else None


CONTEXT = ("data", "context")


@exhibit("attention: gradients of keys and values are not summed", "NVIDIA/TransformerEngine/issues/1557", mesh=CONTEXT)
def not_summed(line: BoundSymbol) -> Proxy | None:
    """Each rank keeps what its own queries contribute."""
    if line.sym is sequence.SCATTER.issue:
        return line.args[0]
    return sequence.cut(line.args[0], line.args[1]) if line.sym is sequence.SCATTER.wait else None


SPLIT: dict[str, Any] = {"within": "split_sequence", "mesh": CONTEXT}


@exhibit("a partial value is taken for a replicated one", "pytorch/torchtitan/pull/3412", **SPLIT)
def partial(line: BoundSymbol) -> Proxy | None:
    """A mean over positions lacks those of the other ranks."""
    return line.args[0] if line.sym is sequence.sum_parts and line.args[0].ndim > 0 else None


@exhibit("loss: label smoothing by the words of one rank", "NVIDIA/Megatron-LM/issues/7464", smoothing=0.1, **SPLIT)
def smoothing(line: BoundSymbol) -> Proxy | None:
    """If a rank has half of the words, each gets twice its share."""
    call = call_of(line.sym)
    if call is None or call.function is not F.cross_entropy:
        return None
    (loss,) = replace(call, flat=[0.2 if x == 0.1 else x for x in call.flat]).symbol(*line.args)
    return loss


@exhibit("loss: logits are gathered, and their losses added up", "NVIDIA/Megatron-LM/issues/7452", **SPLIT)
def gathered(line: BoundSymbol) -> Proxy | None:
    if line.sym is sequence.cut:
        ROWS[:] = [sequence.Part(line.args[1].plan, Split(0, 2, POSITIONS, 1))]
    call = torch_line(line)
    if call is None or call.name != "nn.functional.cross_entropy":
        return None
    logits, labels = (sequence.gather_parts(x, ROWS[0]) for x in call.operands)
    return cross_entropy(logits, labels, *call.args[2:], **call.kwargs)


ROWS: list[sequence.Part] = []


@exhibit("loss: divided by the token count of one rank", "NVIDIA/Megatron-LM/pull/7513", **SPLIT)
def counts(line: BoundSymbol) -> Proxy | None:
    """The second of the two sums: that of the losses comes first."""
    if line.sym is not sequence.sum_parts or line.args[0].ndim > 0:
        return None
    SUMS.append(line)
    return line.args[0] if len(SUMS) % 2 == 0 else None


SUMS: list[BoundSymbol] = []


@exhibit("attention: the mask begins at each rank's first query", "huggingface/accelerate/pull/4177", **SPLIT)
def mask(line: BoundSymbol) -> Proxy | None:
    if "causal_attention" not in line.sym.name:
        return None
    return scaled_dot_product_attention(*line.args, is_causal=True)


@exhibit("positions begin at 0 on each rank", "NVIDIA/Megatron-LM/pull/5243", **SPLIT)
def positions(line: BoundSymbol) -> Proxy | None:
    """The first of two ranks holds positions 0, 1, 6 and 7 of eight."""
    cuts = line.sym is sequence.cut and line.args[0].ndim == 1
    return arange(line.output.shape[0]) if cuts else None


# ---- a step with a wrong line ----


def rewritten(trace: TraceCtx, wrong: Wrong, shown: list[str]) -> TraceCtx:
    """The trace with an exhibit's wrong lines. ``shown`` gets the first right one, and what stands in its place."""
    new = from_trace(trace)
    swap: dict[Any, Any] = {}
    for line in trace.bound_symbols:
        line = line.from_bsym_swap_proxies(swap, skip_output=True)
        new.push_scope([])
        with tracectx(new), langctx(Languages.TORCH):
            found = wrong(line)
        made = new.pop_scope()
        if found is None:
            new.bound_symbols += [] if swap and is_deletion(line) else [line]  # the schedule deletes values again
            continue
        if isinstance(found, BoundSymbol):
            made = [found]
        else:
            swap |= {variableify(result): found for result in line.flat_proxy_outs}
        new.bound_symbols += made
        shown += [printed(line), "; ".join(map(printed, made)) or "(no line: its first operand is used)"]
    return new


def compile_with(e: Exhibit, example: tuple[Tensor, Tensor], shown: list[str]) -> tuple[Any, nn.Module, Tensor]:
    """Runs forward with an exhibit's wrong lines. Returns the jitted model, the sharded one, and the loss."""
    options, ranks = dict(e.options), dist.get_world_size()
    if e.mesh:
        shape = (1, ranks) if e.shares_sequences else (2, ranks // 2)
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=e.mesh)
    if e.shares_sequences:
        options["context_parallel"] = shardtrace.ContextParallel("context", attention="gather")

    def change(trace: TraceCtx) -> TraceCtx:
        return rewritten(trace, e.wrong, shown)

    def changed(entry: pipeline.Entry) -> pipeline.Entry:
        return entry._replace(run=wraps(entry.run)(lambda trace, **facts: change(entry.run(trace, **facts))))

    entries = tuple(changed(entry) if entry.name == e.within else entry for entry in pipeline.BEFORE_AUTODIFF)
    torch.manual_seed(0)
    model = shardtrace.fsdp(Model(e.smoothing), checks=shardtrace.Checks(prove=False), **options)
    with mock.patch.object(pipeline, "BEFORE_AUTODIFF", entries):
        jitted = thunder.jit(model, transforms=[] if e.within else [PassAfterLowering(change)])
        return jitted, model, jitted(*example)


# ---- the gallery ----


def main() -> None:
    warnings.simplefilter("ignore")
    real, missed = dist.is_torchelastic_launched(), []
    right = Exhibit("the right step", "", lambda line: None, **SPLIT)
    with common.process_group(torch.device("cpu")) if real else nullcontext():
        for number, e in enumerate([right, *EXHIBITS]):
            with nullcontext() if real else fake_ranks(4 if "replicate" in e.mesh else 2):
                missed += [e.name] if show(number, e, real=real) is (e is not right) else []
        with nullcontext() if real else fake_ranks(2):
            show_means_of_means(len(EXHIBITS) + 1)
    if missed:
        sys.exit(f"the proof is wrong about: {'; '.join(missed)}")


def show(number: int, e: Exhibit, *, real: bool) -> bool:
    """Prints an exhibit, with numbers if its ranks are ``real``. Returns whether it is called proven."""
    shown: list[str] = []
    jitted, model, loss = compile_with(e, batch(0 if e.shares_sequences else dist.get_rank()), shown)
    start = time.process_time()
    proof = shardtrace.prove(jitted)
    seconds = time.process_time() - start
    verdict, *why = str(proof).splitlines()
    lines = [f"{number}. {e.name}", *([e.report, f"right: {shown[0]}", f"wrong: {shown[1]}"] if shown else [])]
    lines += [compare(e, model, loss)] if real else []
    say([*lines, f"{verdict} ({seconds:.2f} s)", *why])
    return proof.verdict != "unproven"


def compare(e: Exhibit, model: nn.Module, loss: Tensor) -> str:
    """The errors of the loss and of the worst gradient, relative to eager PyTorch on the batches of all ranks."""
    torch.manual_seed(0)
    eager = Model(e.smoothing)
    losses = [eager(*batch(rank)) for rank in ([0] if e.shares_sequences else range(dist.get_world_size()))]
    torch.stack(losses).mean().backward()
    loss.backward()
    own = losses[0 if e.shares_sequences else dist.get_rank()]
    return f"loss off by {abs(loss / own - 1):.2%}, {worst(shardtrace.full_gradients(model), eager)}"


def worst(found: dict[str, Any], eager: nn.Module) -> str:
    """The gradient with the largest error, relative to its largest element."""
    expected = {n: p.grad for n, p in eager.named_parameters() if p.grad is not None}
    off = {n: float((found[n] - g).abs().max() / g.abs().max()) for n, g in expected.items()}
    name = max(off, key=off.__getitem__)
    return f"gradient of {name} off by {off[name]:.0%}"


def show_means_of_means(number: int) -> None:
    """The loss of a user who accumulates gradients. No line is wrong: the step is what the model says."""
    tokens, labels = zip(*map(batch, range(2)), strict=True)
    apart, together = Model(0.0), Model(0.0)
    together.load_state_dict(apart.state_dict())
    torch.stack([apart(*batch(0)), apart(*batch(1))]).mean().backward()
    together(torch.cat(tokens), torch.cat(labels)).backward()
    error = worst({n: p.grad for n, p in apart.named_parameters()}, together)
    model = shardtrace.fsdp(Model(0.0), checks=shardtrace.Checks(prove=False))
    jitted = thunder.jit(model)
    with shardtrace.no_sync(model):
        jitted(*batch(dist.get_rank()))
    report = "https://github.com/huggingface/transformers/pull/34191"
    counts = " and ".join(str(int((y != -100).sum())) for y in labels)
    numbers = f"eager PyTorch, batches of {counts} tokens in two steps for one: {error}"
    say([f"{number}. accumulation: the mean of two means", report, numbers, str(shardtrace.prove(jitted))])


def say(lines: list[str]) -> None:
    if dist.get_rank() == 0:
        print("\n   ".join(lines), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
