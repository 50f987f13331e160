"""Plans: which options of ``fsdp`` fit into a memory and are the fastest, predicted without running anything."""

from shardtrace.planner.planning import plan

__all__ = ["plan"]
