"""Torch's own kernels, forward and backward, as an executor of Thunder."""

from passes.kernels.executors import executor

__all__ = ["executor"]
