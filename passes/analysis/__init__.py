"""Facts about a trace: the table of symbols, recognisers, FLOPs, traffic, memory, and the proof of the invariants.

Functions that share the name of their module (``dry_run``, ``flops``, ``verify``) are imported from it.
"""

from passes.analysis.flops import bytes_moved
from passes.analysis.recognise import (
    bucket_of,
    is_backward,
    is_collective,
    is_deletion,
    is_gather,
    is_issue,
    is_offload,
    is_random,
    is_return,
    is_unpack,
    is_wait,
    issues_future,
    names,
    nbytes,
    waits_for_future,
)
from passes.analysis.seconds import compute_seconds, link_seconds
from passes.analysis.symbols import properties
from passes.analysis.traffic import Collective, collectives
from passes.analysis.verify import VerificationError
from passes.comm.properties import Property

__all__ = [
    "Collective",
    "Property",
    "VerificationError",
    "bucket_of",
    "bytes_moved",
    "collectives",
    "compute_seconds",
    "is_backward",
    "is_collective",
    "is_deletion",
    "is_gather",
    "is_issue",
    "is_offload",
    "is_random",
    "is_return",
    "is_unpack",
    "is_wait",
    "issues_future",
    "link_seconds",
    "names",
    "nbytes",
    "properties",
    "waits_for_future",
]
