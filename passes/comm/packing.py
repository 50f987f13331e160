"""The places of a bucket's members in the messages of its ranks, if the large ones are rounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from passes.comm.quantize import Format
from passes.plan import Bucket, Kernels, Placement
from passes.plan.layout import Layout

import torch
from thunder.core import dtypes

ROUNDED = (dtypes.float32, dtypes.bfloat16, dtypes.float16)  # dtypes at rest that are rounded
SMALLEST = 1024  # elements of a member in a rank's row, below which rounding saves next to nothing
ALIGNMENT = 16  # bytes at which rows begin
# Elements that are rounded at once: what a CPU's cache holds, what occupies a GPU.
CPU_CHUNK, GPU_CHUNK = 2**18, 2**24


class Packing:
    """The rows of a bucket, and the messages in them.

    A rank's row has a message for each of its members that are ``rounded``, then the ``exact`` ones as their layout
    has them, in the dtype of the bucket. Rows are padded to ``ALIGNMENT``.
    """

    def __init__(self, bucket: Bucket, format: Format) -> None:
        plan = bucket.plan
        whole = self.whole = plan.placement is Placement.OWNER  # members are on the rank that owns them
        self.numels = [m.parameter.full_numel // (1 if whole else plan.world_size) for m in bucket.members]
        large = bucket.rest_dtype in ROUNDED and plan.world_size > 1
        self.rounded = tuple(i for i, numel in enumerate(self.numels) if large and numel >= SMALLEST)
        self.exact = tuple(i for i in range(len(self.numels)) if i not in self.rounded)
        self.format, self.rank = format, plan.rank
        self.chunk = chunk_of(on_cpu=plan.direct)  # ranks send messages to each other only between CPUs
        self.exact_layout = self._layout(bucket, self.exact)
        self.rounded_layout = self._layout(bucket, self.rounded)
        self.rows: list[dict[int, slice]] = []  # for each rank, the messages of its rounded members
        self.exact_rows: list[slice] = []  # for each rank, the bytes of its exact members
        self.row_bytes: list[int] = []
        for rank in range(plan.world_size):
            at, places = 0, dict[int, slice]()
            for i in self.rounded:
                if not whole or bucket.members[i].parameter.owner == rank:
                    places[i] = slice(at, at := at + format.nbytes(self.numels[i]))
            exact = self.exact_layout.row_sizes[rank] * bucket.dtype.bytes if self.exact_layout is not None else 0
            self.rows.append(places)
            self.exact_rows.append(slice(at, at + exact))
            self.row_bytes.append(-(-(at + exact) // ALIGNMENT) * ALIGNMENT)

    @staticmethod
    def _layout(bucket: Bucket, members: Sequence[int]) -> Layout | None:
        return bucket.layout_of([bucket.members[i] for i in members]) if members else None

    def work(self, one: Callable[[int], Kernels]) -> Kernels:
        """The work on the rounded members of all rows. That on ``one`` of them is a function of its elements there."""
        return sum((one(self.numels[i]) for i in self.rounded), Kernels()) * (1 if self.whole else len(self.rows))

    @property
    def exact_bytes(self) -> int:
        """The bytes of the exact members of all rows."""
        return sum(place.stop - place.start for place in self.exact_rows)

    def write(self, row: torch.Tensor, rank: int, values: Mapping[int, torch.Tensor]) -> None:
        """Rounds flat values, by member, into the row of a rank. Missing ones at the end are zeros: padding."""
        for i, place in self.rows[rank].items():
            self.format.pack(padded(values[i], self.numels[i]), row[place], chunk=self.chunk)

    def read(self, row: torch.Tensor, rank: int, i: int, values: torch.Tensor, *, add: float | None = None) -> None:
        """Writes the values of a member into a flat tensor, or adds them to it, multiplied by ``add``."""
        self.format.unpack(row[self.rows[rank][i]], values, chunk=self.chunk, add=add)


def chunk_of(*, on_cpu: bool) -> int:
    """The elements that are rounded at once."""
    return CPU_CHUNK if on_cpu else GPU_CHUNK


def padded(flat: torch.Tensor, numel: int) -> torch.Tensor:
    """A flat tensor with zeros at its end, or the same one if it has ``numel`` elements."""
    return flat if flat.numel() == numel else torch.nn.functional.pad(flat, (0, numel - flat.numel()))
