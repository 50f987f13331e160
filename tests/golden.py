"""Golden traces: the lines of one stage as short text. To accept new texts: ``EXPECTTEST_ACCEPT=1 pytest``."""

from shardtrace.testing import compile_fake, stage, text

__all__ = ["compile_fake", "stage", "text"]
