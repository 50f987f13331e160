"""Wires that round what they carry: parameters on their way to their use, gradients on their way to their shards.

A gather rounds each rank's shards, at rest, once; this rank's own go through the same rounding, so that all ranks
compute with equal parameters. Gradients of a rounded parameter are those of its shard (a straight-through estimator).

A reduction rounds each rank's part of a gradient once and sends it to the rank that owns the shard, which adds up all
parts in fp32 and divides the sum: one rounding, where a ring would round at each hop. Its own part stays exact. An
all_reduce consists of such a reduction to equal pieces of each parameter and a gather of these.

Large members are rounded in blocks (:mod:`passes.comm.quantize`). Small ones (biases, norms, 0-dim parameters) travel
in the same message in their own dtype. :mod:`passes.comm.packing` has their places.

Source: ZeRO++ (Wang et al., 2023, https://arxiv.org/abs/2306.10209), qwZ and qgZ; error feedback as in 1-bit SGD
(Seide et al., 2014).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from passes.comm import messages
from passes.comm.packing import Packing, Stacks, padded
from passes.comm.quantize import FP32, INT8, Format
from passes.plan import Bucket, Ends, Kernels, Member, Placement, Wire
from passes.plan.layout import summed_to

import torch

ERROR = torch.bfloat16  # the dtype of errors that are kept


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
        rank = packing.rank
        row = shards[0].new_empty(1, packing.row_bytes[rank], dtype=torch.uint8)
        if members := packing.blocks[rank]:
            parts = packing.messages(row, rank)
            if packing.at_once:
                packing.pack(packing.joined_shards(shards), parts)
            for i, blocks in members.items() if not packing.at_once else ():
                packing.pack(shards[i].reshape(1, -1), parts.part(blocks))
        if packing.exact_layout is not None:
            exact = packing.exact_layout.pieces([shards[i] for i in packing.exact])
            torch.cat(exact, out=packing.exact_of(row, rank).view(-1))
        return messages.gather(row.view(-1), packing.row_bytes, bucket)

    def finish(self, future: messages.InFlight, bucket: Bucket) -> tuple[torch.Tensor, ...]:
        packing: Packing = bucket.prepared
        stacks = packing.cut(future.wait(), packing.stacks)
        full: dict[int, torch.Tensor] = {}
        if (layout := packing.exact_layout) is not None:
            exact = [packing.exact_of(rows, first).reshape(-1) for first, rows in stacks]
            flat = exact[0] if len(exact) == 1 else torch.cat(exact)
            full |= zip(packing.exact, layout.unpack_rows(flat), strict=True)
        for first, rows in stacks:
            full |= packing.unpack(rows, first)
        for i in packing.rounded:
            shape = bucket.members[i].parameter.full_shape
            full[i] = full[i].view(-1)[: math.prod(shape)].view(shape)
        return tuple(full[i] for i in range(len(bucket.members)))

    def work(self, bucket: Bucket) -> Ends:
        """The mean over ranks, which owners may differ from."""
        packing: Packing = bucket.prepared
        chunk, share, width = packing.chunk, 1 / bucket.plan.world_size, bucket.dtype.bytes
        rest, format, ranks = bucket.rest_dtype.bytes, self.format, bucket.plan.world_size
        issue = packing.work(lambda n, rows: format.pack_work(n, rest, chunk=chunk), rows=1, share=share)
        finish = packing.work(lambda n, rows: format.unpack_work(n, width, chunk=chunk, rows=rows), rows=ranks, share=1)
        if packing.at_once and len(packing.rounded) > 1 and not packing.whole:  # which are cut apart
            finish += Kernels(1, 2 * width * ranks * sum(packing.numels[i] for i in packing.rounded))
        if packing.exact:  # joined, at the end by ranks and by members
            issue += Kernels(1, 2 * share * packing.exact_bytes)
            finish += Kernels(2, 4 * packing.exact_bytes)
        return Ends(issue, finish)


class _Reducing(NamedTuple):
    """Parts of gradients in flight. ``own`` are this rank's parts of its shards: rounded members in fp32, divided and
    padded to whole blocks, exact ones in the dtype of the bucket."""

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
            parts = sum(i in blocks for rank, blocks in enumerate(packing.blocks) if rank != packing.rank)
            key = bucket.plan.axis, bucket.members[i].parameter.index
            if key not in errors:
                errors[key] = torch.zeros(parts, packing.numels[i], dtype=ERROR, device=device)
            found.append(errors[key])
        return found

    def issue(self, grads: tuple[torch.Tensor, ...], bucket: Bucket) -> _Reducing:
        packing: Packing = bucket.prepared
        at_once = packing.at_once and not self.error_feedback
        stacks = packing.stacks if at_once else packing.others
        sent = grads[0].new_empty(packing.bytes_of(stacks), dtype=torch.uint8)
        own = grads[0].new_empty(packing.own_numel, dtype=torch.float32)
        flat = {i: summed_to(grads[i], bucket.members[i].parameter.full_shape).reshape(-1) for i in packing.rounded}
        cut = packing.cut(sent, stacks)
        if at_once:
            self._pack_at_once(flat, cut, own, bucket)
        else:
            self._pack_each(flat, cut, own, bucket)
        own_exact = None
        if (layout := packing.exact_layout) is not None:
            exact = layout.pack_rows([grads[i] for i in packing.exact])
            own_exact = exact.split_with_sizes(layout.row_sizes)[packing.rank]
            for first, rows in cut:
                values = exact[sum(layout.row_sizes[:first]) :][: len(rows) * layout.row_sizes[first]]
                packing.exact_of(rows, first).copy_(values.view(len(rows), -1))
        if at_once:
            sent = packing.without_own(sent)
        return _Reducing(messages.swap(sent, packing.row_bytes, bucket), own, own_exact)

    def _pack_at_once(self, flat: Mapping[int, torch.Tensor], cut: Stacks, own: torch.Tensor, bucket: Bucket) -> None:
        packing: Packing = bucket.prepared
        for first, rows in cut:
            members = packing.blocks[first]
            if not members:
                continue
            ranks = len(rows)
            values = packing.joined([padded(flat[i], ranks * packing.numels[i]).view(ranks, -1) for i in members])
            if first <= packing.rank < first + ranks:
                torch.mul(values[packing.rank - first].float(), 1 / bucket.plan.divisor, out=own)
            packing.pack(values, packing.messages(rows, first))

    def _pack_each(self, flat: Mapping[int, torch.Tensor], cut: Stacks, own: torch.Tensor, bucket: Bucket) -> None:
        packing: Packing = bucket.prepared
        rank, share = packing.rank, 1 / bucket.plan.divisor
        errors = dict(zip(packing.rounded, self.state(bucket, own.device), strict=False))
        for i in packing.blocks[rank]:
            start, stop = bucket.members[i].parameter.pieces[rank]
            mine = packing.own_part(own, i)
            torch.mul(flat[i][start:stop].float(), share, out=mine[: stop - start])
            mine[stop - start :].zero_()
        for first, rows in cut:
            members = packing.blocks[first]
            parts = packing.messages(rows, first) if members else None
            before = 0 if packing.whole else first - (first > rank)  # rows of errors: this rank has none
            for i, blocks in members.items():
                for at, values in packing.parts(flat[i], i, first, len(rows)):
                    here = slice(at, at + len(values))
                    error = errors[i][before:][here] if i in errors else None
                    assert parts is not None
                    packing.pack(values, parts.part(blocks, here), error)

    def finish(self, future: _Reducing, bucket: Bucket) -> tuple[torch.Tensor, ...]:
        packing: Packing = bucket.prepared
        rank, dtype, share = packing.rank, bucket.torch_reduced_dtype, 1 / bucket.plan.divisor
        received, own = future.parts.wait(), future.own  # also if this rank only sends
        parts = received.view(bucket.plan.world_size - 1, packing.row_bytes[rank])
        packing.add(parts, own, share)
        own = own.to(dtype)
        reduced: dict[int, torch.Tensor] = {}
        for i in packing.rounded:
            shape = bucket.members[i].parameter.shard_shape
            mine = i in packing.blocks[rank]
            reduced[i] = packing.own_part(own, i).view(shape) if mine else own.new_empty(shape)
        if (layout := packing.exact_layout) is not None and future.own_exact is not None:
            exact, others = future.own_exact.float().mul_(share), packing.exact_of(parts, rank)
            if packing.at_once:
                exact.add_(others.sum(0, dtype=torch.float32), alpha=share)
            else:
                for part in others:
                    exact.add_(part, alpha=share)
            reduced |= zip(packing.exact, layout.unpack_row(exact.to(dtype)), strict=True)
        return tuple(reduced[i] for i in range(len(bucket.members)))

    def work(self, bucket: Bucket) -> Ends:
        """The mean over ranks, which owners may differ from."""
        packing: Packing = bucket.prepared
        width, chunk, ranks = bucket.dtype.bytes, packing.chunk, bucket.plan.world_size
        own, others = 1 / ranks, (ranks - 1) / ranks  # the parts that stay here, and that go to or come from others
        format, errors = self.format, self.error_feedback
        issue = packing.work(
            lambda n, rows: format.pack_work(n, width, chunk=chunk, error=errors, rows=rows),
            rows=ranks if packing.at_once else ranks - 1,
            share=others,
        ) + packing.work(lambda n, rows: Kernels(2, n * (width + FP32)), rows=1, share=own)
        finish = packing.work(
            lambda n, rows: format.add_work(n, chunk=chunk, rows=ranks - 1, at_once=packing.at_once), rows=1, share=own
        )
        if packing.exact:
            exact = Kernels(3, 4 * packing.exact_bytes)
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
