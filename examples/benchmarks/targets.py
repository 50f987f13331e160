"""The targets of shardtrace, each as one ratio, and whether this run met them."""

from __future__ import annotations

from statistics import median
from typing import Any, NamedTuple

Result = dict[str, Any]  # of one setting, made by ranks.py

STRATEGIES = {"zero2": "fsdp2 keep", "zero3": "fsdp2 reshard"}  # FSDP2 contenders with the same resharding


class Target(NamedTuple):
    """A target is met if ``value`` stands in ``relation`` (">=", ">", "<=" or "<") to ``bound``."""

    setting: str
    what: str
    value: float
    relation: str
    bound: float

    @property
    def met(self) -> bool:
        met = {">=": self.value >= self.bound, ">": self.value > self.bound,
               "<=": self.value <= self.bound, "<": self.value < self.bound}  # fmt: skip
        return met[self.relation]


def targets(results: list[Result]) -> list[Target]:
    """The targets that ``results`` decide. Targets of contenders that did not run are left out."""
    found: list[Target] = []
    for result in results:
        if result["rate_gbit"] == 1:
            found += slow_link(result, {"zero2": 1.9, "zero3": 1.9}) + slow_link_against_others(result)
            found += rounded(result)
        elif result["rate_gbit"] == 2:
            found += slow_link(result, {"zero2": 1.3, "zero3": 1.45})
        elif result["setting"] == "loopback":
            found += loopback(result)
        found += memory(result) + single(result) + passes(result) + overhead(result)
    return found


def slow_link(result: Result, bounds: dict[str, float]) -> list[Target]:
    return [
        Target(result["setting"], f"speed of {name} over {STRATEGIES[strategy]}", value, ">=", bounds[strategy])
        for name, strategy in variants(result)
        if (value := speed(result, name, STRATEGIES[strategy])) is not None
    ]


def slow_link_against_others(result: Result) -> list[Target]:
    setting, rows, found = result["setting"], result["contenders"], []
    for name, strategy in variants(result):
        value = speed(result, name, "thunder.distributed.fsdp")
        if value is not None:
            found.append(Target(setting, f"speed of {name} over thunder.distributed", value, ">=", 1.6))
        value = speed(result, name, "ddp")
        if value is not None:
            found.append(Target(setting, f"speed of {name} over ddp", value, ">=", 1.15))
        moved = result["communication"].get(f"shardtrace {strategy}")
        if moved is not None and "single eager" in rows:
            alone = max(middle(result, "single eager"), moved["raw_s"])
            value = middle(result, name) / alone
            what = f"step of {name} over max(compute only, communication only)"
            found.append(Target(setting, what, value, "<=", 1.25))
    return found


def loopback(result: Result) -> list[Target]:
    found = []
    for strategy, peer in STRATEGIES.items():
        ours = [name for name, s in variants(result) if s == strategy]
        theirs = [name for name in (peer, f"{peer} compiled") if name in result["contenders"]]
        if ours and theirs:
            best, rival = (min(names, key=lambda name: middle(result, name)) for names in (ours, theirs))
            value = speed(result, best, rival)
            assert value is not None
            found.append(Target(result["setting"], f"speed of {best} over {rival}, the better", value, ">=", 1.15))
    return found


def memory(result: Result) -> list[Target]:
    found = []
    rows = result["contenders"]
    for name, strategy in variants(result):
        row = rows[name]
        if strategy == "zero3" and "fsdp2 reshard" in rows:
            value = row["peak_bytes"] / rows["fsdp2 reshard"]["peak_bytes"]
            found.append(Target(result["setting"], f"peak memory of {name} over fsdp2 reshard", value, "<=", 1.0))
        if strategy == "zero3" and row.get("predicted_peak_bytes"):
            value = abs(row["peak_bytes"] / row["predicted_peak_bytes"] - 1)
            what = f"peak memory of {name}, measured against the trace's liveness: off by"
            found.append(Target(result["setting"], what, value, "<=", 0.1))
    return found


def single(result: Result) -> list[Target]:
    """One process without communication."""
    name, rival, rows = "single shardtrace", "single eager", result["contenders"]
    if name not in rows or rival not in rows or result["rate_gbit"] is not None:
        return []
    step, peak = speed(result, rival, name), rows[name]["peak_bytes"] / rows[rival]["peak_bytes"]
    assert step is not None
    return [
        Target(result["setting"], "step of one process over eager", step, "<=", 1.03),
        Target(result["setting"], "peak memory of one process over eager", peak, "<=", 1.02),
    ]


def passes(result: Result) -> list[Target]:
    """Only with the default executors, because others compile more than Thunder's traces in the first step."""
    rows = [result["contenders"].get(f"shardtrace {strategy}") for strategy in STRATEGIES]
    return [
        Target(result["setting"], f"time in our passes over Thunder's, {strategy}", value, "<=", 0.1)
        for strategy, row in zip(STRATEGIES, rows, strict=True)
        if row is not None and row["compile_s"] > row["passes_s"]
        for value in [row["passes_s"] / (row["compile_s"] - row["passes_s"])]
    ]


def overhead(result: Result) -> list[Target]:
    measured = result.get("host_overhead") or {}
    return [
        Target(result["setting"], f"host overhead of {s} over plain thunder.jit, in ms", measured[s] * 1e3, "<", 1.0)
        for s in STRATEGIES
        if s in measured
    ]


def rounded(result: Result) -> list[Target]:
    """ZeRO-3 with rounded gathers and reductions."""
    name, exact, rows = "shardtrace zero3 int8", "shardtrace zero3", result["contenders"]
    if name not in rows:
        return []
    setting, found = result["setting"], []
    if exact in rows:
        value = rows[name]["bytes"] / rows[exact]["bytes"]
        found.append(Target(setting, f"bytes of {name} over those of {exact}", value, "<=", 0.3))
    if (value := speed(result, name, "fsdp2 reshard")) is not None:
        found.append(Target(setting, f"speed of {name} over fsdp2 reshard", value, ">=", 2.5))
    if "single eager" in rows:
        value = middle(result, name) / middle(result, "single eager")
        found.append(Target(setting, f"step of {name} over compute only", value, "<=", 1.15))
    return found


def variants(result: Result) -> list[tuple[str, str]]:
    """The shardtrace contenders of this result that round nothing, each with its strategy."""
    names = [name for name in result["contenders"] if name.startswith("shardtrace ") and not name.endswith(" int8")]
    return [(name, name.split()[1]) for name in names]


def middle(result: Result, name: str) -> float:
    seconds: float = result["contenders"][name]["step_s"]["median"]
    return seconds


def speed(result: Result, name: str, rival: str) -> float | None:
    """Speed over ``rival``: the median of the ratios of each round. None if ``rival`` did not run."""
    rows = result["contenders"]
    if rival not in rows:
        return None
    return median(b / a for a, b in zip(rows[name]["seconds"], rows[rival]["seconds"], strict=True))
