"""Torch's own kernels, forward and backward, as an executor of Thunder: one file for each family of functions."""

from passes.kernels import activations, attention, convolution, dropout, linear, losses, norms, parts, products, softmax
from passes.kernels.registration import executor

__all__ = [
    "activations",
    "attention",
    "convolution",
    "dropout",
    "executor",
    "linear",
    "losses",
    "norms",
    "parts",
    "products",
    "softmax",
]
