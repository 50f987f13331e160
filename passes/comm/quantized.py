"""Wires that round what they carry: parameters on their way to their use, gradients on their way to their shards.

A gather rounds each rank's shards, at rest, once; this rank's own go through the same rounding, so that all ranks
compute with equal parameters. Gradients of a rounded parameter are those of its shard (a straight-through estimator).

A reduction rounds each rank's part of a gradient once and sends it to the rank that owns the shard, which adds up all
parts in fp32 and divides the sum: one rounding, where a ring would round at each hop. Its own part stays exact. An
all_reduce consists of such a reduction to equal pieces of each parameter and a gather of these.

Large members are rounded in blocks (:mod:`passes.comm.quantize`). Small ones (biases, norms, 0-dim parameters) travel
in the same message in their own dtype.

Source: ZeRO++ (Wang et al., 2023, https://arxiv.org/abs/2306.10209), qwZ and qgZ; error feedback as in 1-bit SGD
(Seide et al., 2014).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from passes.comm import messages
from passes.comm.quantize import FP32, INT8, Format
from passes.plan import Bucket, Ends, Kernels, Member, Placement, Wire
from passes.plan.layout import Layout, summed_to

import torch
from thunder.core import dtypes

ERROR = torch.bfloat16  # the dtype of errors that are kept
ROUNDED = (dtypes.float32, dtypes.bfloat16, dtypes.float16)  # dtypes at rest that are rounded
SMALLEST = 1024  # elements of a member in a rank's row, below which rounding saves next to nothing
ALIGNMENT = 16  # bytes at which rows begin
# Elements that are rounded at once: what a CPU's cache holds, what occupies a GPU.
CPU_CHUNK, GPU_CHUNK = 2**18, 2**24


def gather_wire(format: Format) -> Wire:
    """The wire that gathers parameters in a format. It takes buckets in which it has something to round."""
    wire = _Gather(format)
    return Wire(
        issue=wire.issue,
        finish=wire.finish,
        bytes=lambda bucket: sum(bucket.prepared.row_bytes),
        name=format.name,
        takes=lambda bucket: bucket.plan.placement is not Placement.REPLICATE and bool(Packing(bucket, format).rounded),
        prepare=lambda bucket: Packing(bucket, format),
        work=wire.work,
    )


def reduction_wire(format: Format, *, error_feedback: bool = False) -> Wire:
    """The wire that reduces gradients in a format.

    ``error_feedback``: each rank keeps what the rounding of its parts has lost, and adds it to those of the next step:
    2 bytes for each element that it sends to others.
    """
    reduce = _Reduce(format, error_feedback)
    all_reduce = _AllReduce(reduce)

    def how(bucket: Bucket) -> _Reduce | _AllReduce:
        return all_reduce if bucket.plan.placement is Placement.REPLICATE else reduce

    return Wire(
        issue=lambda grads, bucket: how(bucket).issue(grads, bucket),
        finish=lambda future, bucket: how(bucket).finish(future, bucket),
        bytes=lambda bucket: how(bucket).bytes(bucket),
        name=format.name,
        takes=lambda bucket: bool(Packing(_as_shards(bucket), format).rounded),
        prepare=lambda bucket: how(bucket).prepare(bucket),
        state=lambda bucket, device: how(bucket).state(bucket, device),
        reduces=True,
        work=lambda bucket: how(bucket).work(bucket),
    )


class _Gather:
    def __init__(self, format: Format) -> None:
        self.format = format

    def issue(self, shards: tuple[torch.Tensor, ...], bucket: Bucket) -> messages.InFlight:
        packing: Packing = bucket.prepared
        row = shards[0].new_empty(packing.row_bytes[packing.rank], dtype=torch.uint8)
        packing.write(row, packing.rank, {i: shards[i].reshape(-1) for i in packing.rounded})
        if packing.exact_layout is not None:
            exact = packing.exact_layout.flat_row([shards[i] for i in packing.exact])
            row[packing.exact_rows[packing.rank]].view(packing.exact_layout.dtype).copy_(exact)
        return messages.gather(row, packing.row_bytes, bucket)

    def finish(self, future: messages.InFlight, bucket: Bucket) -> tuple[torch.Tensor, ...]:
        packing: Packing = bucket.prepared
        rows = future.wait().split_with_sizes(packing.row_bytes)
        full: dict[int, torch.Tensor] = {}
        if (layout := packing.exact_layout) is not None:
            exact = torch.cat([row[at].view(layout.dtype) for row, at in zip(rows, packing.exact_rows, strict=True)])
            full |= zip(packing.exact, layout.unpack_rows(exact), strict=True)
        for i in packing.rounded:
            owners = [rank for rank, places in enumerate(packing.rows) if i in places]
            flat = rows[0].new_empty(len(owners) * packing.numels[i], dtype=bucket.layout.dtype)
            for rank, piece in zip(owners, flat.split(packing.numels[i]), strict=True):
                packing.read(rows[rank], rank, i, piece)
            shape = bucket.members[i].parameter.full_shape
            full[i] = flat[: math.prod(shape)].view(shape)
        return tuple(full[i] for i in range(len(bucket.members)))

    def work(self, bucket: Bucket) -> Ends:
        """The mean over ranks, which owners may differ from."""
        packing: Packing = bucket.prepared
        chunk, share = packing.chunk, 1 / bucket.plan.world_size
        issue = packing.work(lambda n: self.format.pack_work(n, bucket.rest_dtype.bytes, chunk=chunk)) * share
        finish = packing.work(lambda n: self.format.unpack_work(n, bucket.dtype.bytes, chunk=chunk))
        if packing.exact:  # joined twice, by ranks and by members
            issue += Kernels(2, 4 * share * packing.exact_bytes)
            finish += Kernels(2, 4 * packing.exact_bytes)
        return Ends(issue, finish)


class _Reducing(NamedTuple):
    """Parts of gradients in flight. ``own`` are this rank's parts of its shards: rounded members in fp32 and divided,
    exact ones in the dtype of the bucket."""

    parts: messages.InFlight
    own: torch.Tensor
    own_exact: torch.Tensor | None


class _Reduce:
    def __init__(self, format: Format, error_feedback: bool) -> None:
        self.format, self.error_feedback = format, error_feedback

    def prepare(self, bucket: Bucket) -> Packing:
        return Packing(bucket, self.format)

    def bytes(self, bucket: Bucket) -> int:
        return sum(bucket.prepared.row_bytes)

    def state(self, bucket: Bucket, device: torch.device) -> list[torch.Tensor]:
        """For each rounded member, the errors of the parts that go to other ranks: ``(parts, elements of a part)``."""
        packing: Packing = bucket.prepared
        errors, found = bucket.plan.runtime.errors, []
        for i in packing.rounded if self.error_feedback else ():
            parts = sum(i in places for rank, places in enumerate(packing.rows) if rank != packing.rank)
            key = bucket.plan.axis, bucket.members[i].parameter.index
            if key not in errors:
                errors[key] = torch.zeros(parts, packing.numels[i], dtype=ERROR, device=device)
            found.append(errors[key])
        return found

    def issue(self, grads: tuple[torch.Tensor, ...], bucket: Bucket) -> _Reducing:
        packing: Packing = bucket.prepared
        rank, sizes, share = packing.rank, packing.row_bytes, 1 / bucket.plan.divisor
        device = grads[0].device
        rows = grads[0].new_empty(sum(sizes) - sizes[rank], dtype=torch.uint8)
        places = rows.split_with_sizes([0 if r == rank else size for r, size in enumerate(sizes)])
        own = grads[0].new_empty(sum(packing.numels[i] for i in packing.rows[rank]), dtype=torch.float32)
        mine = iter(own.split([packing.numels[i] for i in packing.rows[rank]]))
        errors = dict(zip(packing.rounded, self.state(bucket, device), strict=False))
        for i in packing.rounded:
            parameter, lost = bucket.members[i].parameter, iter(errors.get(i, ()))
            grad = summed_to(grads[i], parameter.full_shape).reshape(-1)
            for r, (start, stop) in enumerate(parameter.pieces):
                if i not in packing.rows[r]:
                    continue
                if r == rank:
                    place = next(mine)
                    torch.mul(grad[start:stop].float(), share, out=place[: stop - start])
                    place[stop - start :].zero_()
                    continue
                part = padded(grad[start:stop], packing.numels[i])
                message = places[r][packing.rows[r][i]]
                self.format.pack(part, message, chunk=packing.chunk, error=next(lost, None))
        own_exact = None
        if (layout := packing.exact_layout) is not None:
            exact = layout.pack_rows([grads[i] for i in packing.exact]).split_with_sizes(layout.row_sizes)
            for r, at in enumerate(packing.exact_rows):
                if r == rank:
                    own_exact = exact[r].clone()  # the others' need not live on
                else:
                    places[r][at].view(layout.dtype).copy_(exact[r])
        return _Reducing(messages.swap(rows, sizes, bucket), own, own_exact)

    def finish(self, future: _Reducing, bucket: Bucket) -> tuple[torch.Tensor, ...]:
        packing: Packing = bucket.prepared
        rank, dtype, share = packing.rank, bucket.torch_reduced_dtype, 1 / bucket.plan.divisor
        size = packing.row_bytes[rank]
        received = future.parts.wait()  # also if this rank only sends
        parts = received.view(bucket.plan.world_size - 1, size).unbind() if size else ()
        for part in parts:
            mine = future.own.split([packing.numels[i] for i in packing.rows[rank]])
            for i, sums in zip(packing.rows[rank], mine, strict=True):
                packing.read(part, rank, i, sums, add=share)
        reduced: dict[int, torch.Tensor] = {}
        if (layout := packing.rounded_layout) is not None:
            reduced |= zip(packing.rounded, layout.unpack_row(future.own.to(dtype)), strict=True)
        if (layout := packing.exact_layout) is not None and future.own_exact is not None:
            exact = future.own_exact.float().mul_(share)
            for part in parts:
                exact.add_(part[packing.exact_rows[rank]].view(layout.dtype), alpha=share)
            reduced |= zip(packing.exact, layout.unpack_row(exact.to(dtype)), strict=True)
        return tuple(reduced[i] for i in range(len(bucket.members)))

    def work(self, bucket: Bucket) -> Ends:
        """The mean over ranks, which owners may differ from."""
        packing: Packing = bucket.prepared
        width, chunk, ranks = bucket.dtype.bytes, packing.chunk, bucket.plan.world_size
        own, others = 1 / ranks, (ranks - 1) / ranks  # the parts that stay here, and that go to or come from others
        packed = packing.work(lambda n: self.format.pack_work(n, width, chunk=chunk, error=self.error_feedback))
        added = packing.work(lambda n: self.format.unpack_work(n, FP32, chunk=chunk, add=True))
        issue = packed * others + packing.work(lambda n: Kernels(2, n * (width + FP32))) * own
        finish = added * others
        if packing.exact:  # one message for each rank
            exact = Kernels(ranks + 1, 4 * packing.exact_bytes)
            issue, finish = issue + exact, finish + exact
        return Ends(issue, finish)


class _TwoTrips(NamedTuple):
    """The bucket of an all_reduce as one of shards, on the wire that reduces these and on the one that gathers them."""

    scattered: Bucket
    gathered: Bucket


class _AllReduce:
    """A reduction to shards, which :meth:`finish` gathers. The shards are rounded to eight bits, whatever the format:
    their errors are in no feedback."""

    def __init__(self, reduce: _Reduce) -> None:
        self.scatter = Wire(
            issue=reduce.issue, finish=reduce.finish, bytes=reduce.bytes, prepare=reduce.prepare, reduces=True
        )
        self.gather = gather_wire(INT8)
        self.reduce = reduce

    def prepare(self, bucket: Bucket) -> _TwoTrips:
        shards = _as_shards(bucket)
        return _TwoTrips(shards.carried_by(self.scatter), shards.carried_by(self.gather))

    def bytes(self, bucket: Bucket) -> int:
        """The mean of both trips."""
        trips: _TwoTrips = bucket.prepared
        return -(-(trips.scattered.bytes + trips.gathered.bytes) // 2)

    def state(self, bucket: Bucket, device: torch.device) -> list[torch.Tensor]:
        return self.reduce.state(bucket.prepared.scattered, device)

    def work(self, bucket: Bucket) -> Ends:
        trips: _TwoTrips = bucket.prepared
        there, back = self.reduce.work(trips.scattered), trips.gathered.work
        return Ends(there.issue, there.finish + back.issue + back.finish, late=trips.gathered.bytes)

    def issue(self, grads: tuple[torch.Tensor, ...], bucket: Bucket) -> _Reducing:
        flat = (summed_to(g, m.parameter.full_shape) for g, m in zip(grads, bucket.members, strict=True))
        return self.reduce.issue(tuple(g.reshape(-1) for g in flat), bucket.prepared.scattered)

    def finish(self, future: _Reducing, bucket: Bucket) -> tuple[torch.Tensor, ...]:
        trips: _TwoTrips = bucket.prepared
        shards = self.reduce.finish(future, trips.scattered)
        wire = trips.gathered.wire
        assert wire is not None
        full = wire.finish(wire.issue(shards, trips.gathered), trips.gathered)
        pairs = zip(full, bucket.members, strict=True)
        return tuple(t.to(bucket.torch_reduced_dtype).view(m.parameter.full_shape) for t, m in pairs)


def _as_shards(bucket: Bucket) -> Bucket:
    """A bucket of replicated members as one of their flat shards. Any other bucket as it is."""
    if bucket.plan.placement is not Placement.REPLICATE:
        return bucket
    plan = replace(bucket.plan, placement=Placement.SHARD, outer=None, gather=None, reduction=None)

    def flat(m: Member) -> Member:
        return Member(replace(m.parameter, plan=plan, full_shape=(math.prod(m.parameter.full_shape),)), m.trainable)

    return Bucket(bucket.label, bucket.name, plan, tuple(map(flat, bucket.members)), bucket.dtype)


# ---- the places of a bucket's members in the messages of its ranks ----


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
