"""Torch's own kernels, forward and backward, as an executor of Thunder."""

from passes.kernels.functional import executor

__all__ = ["executor"]
