"""Golden traces: the lines of a stage as short text. ``EXPECTTEST_ACCEPT=1 pytest`` accepts new texts."""

from shardtrace.testing import compile_fake, stage, text

__all__ = ["compile_fake", "stage", "text"]
