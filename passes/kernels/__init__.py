"""Torch's own kernels, forward and backward, as an executor of Thunder: one file for each family of functions, which
registers them when it is imported here."""

from passes.kernels import functional  # noqa: F401
from passes.kernels.registration import executor

__all__ = ["executor"]
