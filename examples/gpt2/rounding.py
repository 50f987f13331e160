"""Train a byte-level GPT-2 with exact and with rounded communication, and compare the losses.

    torchrun --nproc_per_node=2 examples/gpt2/rounding.py --model tiny --steps 300 --picture rounding.svg

All runs train on the same batches from the same weights. Needs matplotlib for ``--picture``.
"""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import shardtrace

import torch

from trainer import OPTIMIZERS, arguments, is_main, new_file, start, table

WIRES: dict[str, dict[str, Any]] = {
    "exact": {},
    "exact, from weights off by a millionth": {},  # the distance that chance makes
    "int8 gathers": {"comm_policy": shardtrace.CommPolicy(gather_dtype="int8")},
    "fp8 gathers": {"comm_policy": shardtrace.CommPolicy(gather_dtype="fp8")},
    "int8 reductions": {"comm_policy": shardtrace.CommPolicy(reduce_wire="int8")},
    "int8 both": {"comm_policy": shardtrace.CommPolicy(gather_dtype="int8", reduce_wire="int8")},
    "int4 reductions": {"comm_policy": shardtrace.CommPolicy(reduce_wire="int4")},
    "int4 reductions, error feedback": {"comm_policy": shardtrace.CommPolicy(reduce_wire="int4", error_feedback=True)},
}
LAST = 20  # steps whose mean loss is compared: a single batch is noisy
APART = 4  # steps between two points of a curve


def main() -> None:
    args = parse_args()
    losses: dict[str, list[float]] = {}
    with start(args) as trainer:
        for name in [n for n in WIRES if args.only is None or n in ("exact", *args.only)]:
            model = trainer.build_model()
            if "millionth" in name:
                for p in model.parameters():
                    p.data.mul_(1 + 1e-6 * torch.randn_like(p))
            shardtrace.fsdp(
                model,
                sharding_strategy=args.sharding_strategy,
                init_policy=shardtrace.InitPolicy(device=trainer.device),
                **WIRES[name],
            )
            optimizer = OPTIMIZERS[args.optimizer](model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
            losses[name] = trainer.run(model, optimizer)["losses"]
        if is_main():
            print(compared(losses))
            if args.picture is not None:
                draw(losses, args.picture)


def compared(losses: dict[str, list[float]]) -> str:
    """A table of the losses at the end and their distances from the exact ones."""
    final = {name: sum(curve[-LAST:]) / len(curve[-LAST:]) for name, curve in losses.items()}
    rows = [
        [name, f"{loss:.4f}", f"{100 * (loss / final['exact'] - 1):+.2f} %" if name != "exact" else ""]
        for name, loss in final.items()
    ]
    return table([["", f"loss, mean of the last {LAST} steps", "off by"], *rows])


def draw(losses: dict[str, list[float]], path: Path) -> None:
    """The loss curves, and their distances from the exact one, each averaged over ``LAST`` steps."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "shardtrace"  # the same losses make the same file
    matplotlib.rcParams["svg.fonttype"] = "none"  # text as text
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, figsize=(7, 6), sharex=True, height_ratios=[2, 1], layout="constrained")
    smooth = {name: [sum(c[i : i + LAST]) / LAST for i in range(len(c) - LAST + 1)] for name, c in losses.items()}
    for name, curve in smooth.items():
        steps = range(LAST, LAST + len(curve), APART)
        above.plot(steps, curve[::APART], label=name, linewidth=1)
        if name != "exact":
            off = [100 * (a / b - 1) for a, b in zip(curve, smooth["exact"], strict=True)]
            below.plot(steps, off[::APART], color=above.lines[-1].get_color(), linewidth=1)
    above.set_ylabel(f"loss, mean of {LAST} steps")
    above.legend(fontsize="small")
    below.axhline(0, color="black", linewidth=0.5)
    below.set_ylabel("off by, %")
    below.set_xlabel("step")
    figure.savefig(path, metadata={"Date": None})
    path.write_text(
        re.sub(r"\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", path.read_text())
    )  # half the bytes


def parse_args() -> Namespace:
    parser = arguments(__doc__, sharding=True)
    parser.set_defaults(steps=300, eval_batches=0)
    parser.add_argument("--picture", type=new_file, metavar="FILE", help="draw the curves into an .svg file")
    parser.add_argument("--only", action="append", choices=list(WIRES), help="run this besides the exact one")
    return parser.parse_args()


if __name__ == "__main__":
    main()
