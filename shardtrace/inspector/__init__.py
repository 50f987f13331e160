"""The inspector: :func:`inspect` gathers what a compiled step does as plain data, and pure functions draw it."""

from shardtrace.inspector.inspection import CollectiveRow, Inspection, MemoryRow, Totals, inspect
from shardtrace.inspector.profiling import Profile, profile
from shardtrace.inspector.record import Rows, Stage

__all__ = ["CollectiveRow", "Inspection", "MemoryRow", "Profile", "Rows", "Stage", "Totals", "inspect", "profile"]
