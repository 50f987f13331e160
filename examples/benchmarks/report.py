"""The results as tables and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from targets import Result, Target

COLUMNS = {
    "contender": "",
    "step s": "median of the rounds",
    "quartiles": "",
    "tokens/s": "of all real ranks",
    "x fsdp2": "speed over the FSDP2 contender with the same resharding: median of the ratios of each round",
    "CPU s": "of all threads of a rank, in a step; it hardly depends on what else the machine does",
    "exposed s": "the step minus the same step with collectives that do nothing",
    "peak MB": "of tensors, on rank 0, from the allocator's own record of one step",
    "coll.": "collectives that a rank issues in a step",
    "MB": "of their unsharded buffers; an all_reduce counts twice, because it reduces and gathers",
    "wire MB": "bytes sent in a step, by the counter of one rank's network interface",
    "compile s": "the first step minus a later one",
    "passes s": "the part of it in shardtrace's passes and verify",
}


def table(result: Result) -> str:
    sizes = result["sizes"]
    ranks = f"{result['world_size']} rank{'s' if result['world_size'] > 1 else ''}"
    experts = f" with {sizes['experts']} experts" if sizes["experts"] else ""
    head = (
        f"{result['setting']}: {ranks}, {sizes['model']} of {sizes['layers']} blocks{experts}, width {sizes['width']}, "
        f"{sizes['dtype']}, batch {sizes['batch']} x {sizes['seq']} on each rank, {sizes['optimizer']}; "
        f"{result['rounds']} rounds of {result['steps_per_round']} steps, interleaved"
    )
    lines = [list(COLUMNS), *(cells(name, row) for name, row in result["contenders"].items())]
    used = [i for i in range(len(COLUMNS)) if any(line[i] != "-" for line in lines[1:])]
    return "\n".join([head, *aligned([[line[i] for i in used] for line in lines]), *notes(result)])


def cells(name: str, row: dict[str, Any]) -> list[str]:
    step = row["step_s"]
    return [
        name,
        f"{step['median']:.3f}",
        f"{step['q1']:.3f}-{step['q3']:.3f}",
        f"{row['tokens_per_s']:,.0f}",
        number(row["speed_of_peer"], ".2f"),
        number(row["processor_s"], ".3f"),
        number(row["exposed_s"], ".3f"),
        number(row["peak_bytes"] / 1e6, ".1f"),
        number(row["collectives"], "d"),
        number(row["bytes"] and row["bytes"] / 1e6, ".1f"),
        number(row["wire_bytes"] and row["wire_bytes"] / 1e6, ".1f"),
        number(row["compile_s"], ".1f"),
        number(row.get("passes_s"), ".2f"),
    ]


def notes(result: Result) -> list[str]:
    lines = []
    if result["measured_gbit"] is not None:
        limit = f" (limited to {result['rate_gbit']:g})" if result["rate_gbit"] else ""
        lines.append(f"link: {result['measured_gbit']:.2f} Gbit/s in each direction at once{limit}")
    for name, moved in result["communication"].items():
        formula = f", by formula {moved['formula_s']:.3f} s" if moved["formula_s"] else ""
        lines.append(
            f"communication alone, {name}: {moved['bytes'] / 1e6:.1f} MB: sent and received without compute "
            f"{moved['raw_s']:.3f} s{formula}, by its own lines of the trace {moved['own_s']:.3f} s"
        )
    rows = result["contenders"]
    if "ddp" in rows and rows["ddp"]["exposed_s"] is not None and any(name.startswith("fsdp2") for name in rows):
        lines.append("on the CPU, FSDP2 does not overlap communication with compute; DDP does")
    lines += [f"failed: {name}: {error}" for name, error in result["failed"].items()]
    overhead = result.get("host_overhead")
    if overhead:
        added = ", ".join(f"{name} adds {s * 1e3:.2f} ms" for name, s in overhead.items() if name != "plain")
        lines.append(
            f"host, model of 100 tiny parameters: thunder.jit {overhead['plain'] * 1e3:.2f} ms a step, {added}"
        )
    return lines


def legend() -> str:
    return "\n".join(aligned([[name, meaning] for name, meaning in COLUMNS.items() if meaning]))


def target_table(targets: list[Target]) -> str:
    if not targets:
        return "targets: the contenders that ran decide none of them"
    lines = [["setting", "target", "measured", "", ""]]
    for t in targets:
        lines.append([t.setting, t.what, f"{t.value:.2f}", f"{t.relation} {t.bound:g}", "met" if t.met else "NOT MET"])
    return "\n".join(["targets", *aligned(lines)])


def aligned(lines: list[list[str]]) -> list[str]:
    """Columns of equal width, words to the left and numbers to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    words = [any(line[i][:1].isalpha() for line in lines[1:]) for i in range(len(widths))]
    return [
        "  ".join(cell.ljust(w) if left else cell.rjust(w) for cell, w, left in zip(line, widths, words, strict=True))
        .rstrip()
        for line in lines
    ]  # fmt: skip


def number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def plot(results: list[Result], path: Path) -> str:
    """Plots the steps of each setting, with exposed communication in its own colour. Returns what was written, or why
    nothing was."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed (pip install 'shardtrace[examples]')"
    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = max(len(result["contenders"]) for result in results)
    size = (6 * len(results) + 2, 0.35 * rows + 1.5)
    figure, axes = pyplot.subplots(1, len(results), figsize=size, squeeze=False, layout="constrained")
    for ax, result in zip(axes[0], results, strict=True):
        names = list(result["contenders"])[::-1]
        medians = [result["contenders"][name]["step_s"]["median"] for name in names]
        exposed = [max(0.0, result["contenders"][name]["exposed_s"] or 0.0) for name in names]
        hidden = [m - e for m, e in zip(medians, exposed, strict=True)]
        ax.barh(names, hidden, color="#4477aa", label="compute, and communication behind it")
        ax.barh(names, exposed, left=hidden, color="#ee6677", label="exposed communication")
        for y, name in enumerate(names):
            step = result["contenders"][name]["step_s"]
            ax.plot([step["q1"], step["q3"]], [y, y], color="black", linewidth=1.5)
        ax.set(title=result["setting"], xlabel="seconds for a step (median; line: quartiles)")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(path)
    pyplot.close(figure)
    return f"plot: {path}"
