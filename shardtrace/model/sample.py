"""A few values of a tensor, which tell if ranks begin with the same ones."""

from __future__ import annotations

import zlib

import torch

ELEMENTS = 256  # of a tensor that are looked at


def sample(values: torch.Tensor) -> str:
    """A checksum of elements of a tensor, evenly spaced, as text. Empty if it has no values.

    Weights that were drawn from another seed, or read from another file, differ in most elements.
    """
    if values.is_meta or not values.numel():
        return ""
    flat = values.detach().reshape(-1) if values.is_contiguous() else values.detach().flatten()
    some = flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS]
    return f", values {zlib.crc32(some.cpu().contiguous().view(torch.uint8).numpy().data):08x}"
