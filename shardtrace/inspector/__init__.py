"""The inspector: :func:`inspect` collects a compiled step as plain data, and pure functions draw it."""

from shardtrace.inspector.inspection import (
    Call,
    CollectiveRow,
    Inspection,
    MemoryRow,
    NothingCompiledError,
    first_call,
    inspect,
    run_script,
)
from shardtrace.inspector.step_data import Rows, Stage
from shardtrace.inspector.summary import Totals
from shardtrace.inspector.timeline import Profile, profile

__all__ = [
    "Call",
    "CollectiveRow",
    "Inspection",
    "MemoryRow",
    "NothingCompiledError",
    "Profile",
    "Rows",
    "Stage",
    "Totals",
    "first_call",
    "inspect",
    "profile",
    "run_script",
]
