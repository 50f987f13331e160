"""Handwritten digits, read from MNIST's files or taken from scikit-learn."""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

NOBODY = -1  # label of an image that pads a batch: the loss ignores it, and it never counts as right
MEAN, STD = 0.1307, 0.3081  # of MNIST's pixels


class Digits(NamedTuple):
    images: Tensor  # (n, 1, 28, 28) float32, normalised
    labels: Tensor  # (n,) int64

    def filled_up(self, multiple: int) -> Digits:
        """Adds blank images until the number of images is divisible by ``multiple``."""
        missing = -len(self.labels) % multiple
        blank = (0, 0) * 3 + (0, missing)  # last dim first
        return Digits(F.pad(self.images, blank), F.pad(self.labels, (0, missing), value=NOBODY))

    def dataset(self) -> TensorDataset:
        return TensorDataset(*self)


class WrongData(ValueError):
    """No digits can be read. The message says why."""


def load_digits(folder: Path | None = None) -> tuple[Digits, Digits]:
    """The training set and the test set."""
    return bundled() if folder is None else (mnist(folder, "train"), mnist(folder, "t10k"))


# ---- MNIST: Gradient-Based Learning Applied to Document Recognition, LeCun et al. 1998 ----


def mnist(folder: Path, part: str) -> Digits:
    """``part`` is "train" (60,000 digits) or "t10k" (10,000). Raises WrongData."""
    images, labels = read_idx(folder, f"{part}-images", 3), read_idx(folder, f"{part}-labels", 1)
    if images.shape[1:] != (28, 28) or len(images) != len(labels) or not len(images):
        found = " x ".join(map(str, images.shape))
        raise WrongData(
            f"{folder}: expected images of 28 x 28 and a label for each, found {found}, {len(labels)} labels"
        )
    if labels.max() > 9:
        raise WrongData(f"{folder}: {part} has the label {labels.max()}, expected digits")
    return Digits(normalised(images[:, None] / 255), labels.long())


def read_idx(folder: Path, name: str, dims: int) -> Tensor:
    """Reads a file of bytes in the idx format: 0 0 8 dims, the size of each dim (4 bytes, big-endian), the bytes."""
    names = [f"{name}{separator}idx{dims}-ubyte{end}" for separator in "-." for end in ("", ".gz")]
    path = next((folder / n for n in names if (folder / n).is_file()), None)
    if path is None:
        raise WrongData(f"{folder}: has no file {names[0]} or {names[1]}")
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise WrongData(f"{path}: {error}") from None
    header = 4 + 4 * dims
    if len(data) < header or data[:4] != bytes([0, 0, 8, dims]):
        raise WrongData(f"{path}: is not an idx file of bytes in {dims} dimensions")
    shape = struct.unpack(f">{dims}I", data[4:header])
    if len(data) - header != math.prod(shape):
        raise WrongData(f"{path}: holds {len(data) - header:,} bytes, its header says {math.prod(shape):,}")
    return torch.frombuffer(bytearray(data[header:]), dtype=torch.uint8).view(shape)


# ---- scikit-learn's: 1,797 digits, 8 x 8 (Optical Recognition of Handwritten Digits, UCI, 1998) ----


def bundled(test: int = 297) -> tuple[Digits, Digits]:
    try:
        from sklearn import datasets
    except ImportError:
        raise WrongData("the default digits need scikit-learn: pip install scikit-learn, or pass --data") from None
    found = datasets.load_digits()
    small = torch.from_numpy(found.images).float()[:, None] / 16
    images = normalised(F.interpolate(small, size=(28, 28), mode="bilinear", align_corners=False))
    labels = torch.from_numpy(found.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, held_out = order[test:], order[:test]
    return Digits(images[train], labels[train]), Digits(images[held_out], labels[held_out])


def normalised(images: Tensor) -> Tensor:
    return (images - MEAN) / STD
