"""The programs that ranks run, as text: the steps of Thunder's FSDP tutorial.

    torchrun --nproc_per_node=2 examples/traces.py [zero2 | zero3 | ddp ...]

A trace is a Python program without branches. Its comments tell the types of values, what each bucket carries, why a
collective is where it is, and which module and line asked for the lines below.
"""

import sys

import shardtrace

import thunder
import torch
import torch.distributed as dist
from thunder.core.trace import TraceCtx
from torch import nn

from common import is_main, pick_device, process_group

DIM = 64


def main(strategy: str = "zero2") -> None:
    device = pick_device()
    with process_group(device):
        torch.manual_seed(0)  # equal weights on all ranks
        model = nn.Sequential(nn.Linear(DIM, DIM, bias=False), nn.Tanh(), nn.Linear(DIM, DIM, bias=False))
        cmodel = shardtrace.fsdp(model.to(device), sharding_strategy=strategy)
        torch.manual_seed(dist.get_rank())  # each rank has its own batch
        cmodel(torch.randn(DIM, DIM, device=device)).sum().backward()

        if is_main():
            stages = {str(trace.get_provenance()).split(" (took")[0]: trace for trace in thunder.last_traces(cmodel)}
            show("Parameters are gathered for their use", stages.get("# Constructed by shardtrace: insert_synchronize"))
            show("Forward and backward in one, with collectives", stages.get("# Constructed by Grad transform pass"))
            show("Forward, as it runs", thunder.last_traces(cmodel)[-1])
            show("Backward, as it runs", thunder.last_backward_traces(cmodel)[-1])


def show(title: str, trace: TraceCtx | None) -> None:
    text = "One rank gathers nothing: run it on two." if trace is None else trace
    print(f"{title}\n{'=' * len(title)}\n{text}\n\n", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
