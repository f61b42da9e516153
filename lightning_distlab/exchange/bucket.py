"""One bucket of tensors on one rank: all its compressors in lock step, one message a round."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import isfinite

import torch
from torch import Tensor

from lightning_distlab.collectives.base import Collective, NativeRound, Round
from lightning_distlab.compression.base import Compression, Compressor, Param, State, Step
from lightning_distlab.exchange.flat import adjacent_runs, joined
from lightning_distlab.exchange.ledger import Ledger
from lightning_distlab.payloads import Bundle, DensePayload, Flags, Op, Payload, Reply, Request, SparsePayload, Wire

DELAYED = "delayed"
"""Key of a parameter's averages that wait for their step, [delay x numel], in its state."""


@dataclass
class Entry:
    """A tensor of a bucket.

    Attributes:
        param: The parameter.
        grad: 1-D local gradient, which becomes the average; zeros where this rank has none.
        state: The compressor's memory on this rank.
        present: This rank has a gradient for it.
    """

    param: Param
    grad: Tensor
    state: State
    present: bool = True

    def delay(self, steps: int) -> None:
        """Put the average into a queue of that many, and take the oldest out; it has begun with zeros."""
        queue = self.state[DELAYED].view(steps, -1)
        oldest = queue[0].clone()
        queue[:-1] = queue[1:].clone()
        queue[-1] = self.grad
        self.grad.copy_(oldest)


@dataclass
class Pending:
    """A bucket whose rounds are over, before anything changed: `commit` or `abandon` decides.

    Attributes:
        entries: The tensors.
        units: Positions of the tensors that each compressor handles.
        running: The compressors, each waiting at its final request.
        replies: What each is going to be sent.
        flags: OR over all ranks.
        present: Bit i: some rank had a gradient for tensor i.
        delay: Steps after which an average is used.
    """

    entries: Sequence[Entry]
    units: list[list[int]]
    running: list[Compression]
    replies: list[Reply]
    flags: Flags
    present: int
    delay: int = 0

    def commit(self, present: int) -> list[Entry]:
        """Let the compressors update their state and write averages; the entries that nobody had are left alone.

        Args:
            present: Which tensors some rank had, agreed by all ranks.

        Returns:
            The entries that now hold an average.
        """
        averaged = []
        for positions, running, reply in zip(self.units, self.running, self.replies, strict=True):
            # Tensors of one unit are all present here, hence all or none of its bits are set.
            if not present >> positions[0] & 1:
                running.close()
                continue
            try:
                running.send(reply)
            except StopIteration:
                averaged += [self.entries[position] for position in positions]
                for position in positions if self.delay else ():
                    self.entries[position].delay(self.delay)
            else:
                name = self.entries[positions[0]].param.name
                raise AssertionError(f"{name}: the compressor asked again after its final request")
        return averaged

    def abandon(self) -> None:
        """Skip the step: states stay as they were before it."""
        for running in self.running:
            running.close()


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no element is NaN or infinite: one reading pass, since a sum keeps either, and one answer of the device.

    Finite tensors whose sum overflows fp32 (values beyond 1e30) count as not finite.
    """
    if not tensors:
        return True
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    sums = [joined([tensors[i] for i in run]).sum(dtype=dtype) for run in adjacent_runs(tensors)]
    return isfinite(sums[0] if len(sums) == 1 else torch.stack(sums).sum())


def _units(entries: Sequence[Entry], compressor: Compressor) -> list[list[int]]:
    """Positions of the tensors that one running compressor handles together."""
    if not compressor.fuses or not all(entry.present for entry in entries):
        return [[position] for position in range(len(entries))]
    return adjacent_runs([entry.grad for entry in entries])


def exchange_bucket(
    entries: Sequence[Entry],
    compressor: Compressor,
    collective: Collective,
    wire: Wire,
    step: Step,
    flags: Flags,
    ledger: Ledger | None = None,
    place: tuple[int, int] | None = None,
) -> Generator[Round | NativeRound, list[Payload], Pending]:
    """Run the compressors of a bucket up to their final replies.

    Args:
        entries: The tensors, in an order that all ranks share.
        compressor: The method.
        collective: The algorithm.
        wire: Codecs.
        step: The step under way, as this rank's compressor sees it.
        flags: What this rank has to tell the others.
        ledger: Where this rank's own payload bytes are counted, if at all.
        place: Rank and number of ranks in the group, where the compressor counts contributions otherwise.

    Returns:
        The bucket, waiting for the verdict on the step.
    """
    rank, world_size = place or (step.rank, step.world_size)
    present = sum(1 << position for position, entry in enumerate(entries) if entry.present)
    if collective.carries_headers:
        flags |= _zero_unless_finite(entries)
    if collective.ranks_per_node > 1:
        flags, present = yield from _average_within(entries, collective, flags, present, rank, world_size)
    units = _units(entries, compressor)
    running = []
    for positions in units:
        first = entries[positions[0]]
        grad = joined([entries[position].grad for position in positions])
        running.append(compressor.exchange(grad, first.state, first.param, step))
    requests: dict[int, Request] = {i: next(generator) for i, generator in enumerate(running)}
    replies: dict[int, Reply] = {}
    while requests:
        ending = [i for i, request in requests.items() if request.final]
        answers: dict[int, Reply] = {}
        for op, groups in _by_operation(requests, collective.cuts):
            # What was asked for is let go once it is assembled: the message is the only copy from here on.
            parts = [_Part.of([(i, requests.pop(i).payload) for i in members], wire) for members in groups]
            bundle = Bundle(tuple([part.payload for part in parts]), flags, present, len(entries))
            for part in parts:
                del part.payload
            if ledger is not None:
                ledger.payload_bytes += bundle.wire_size() - (0 if collective.carries_headers else bundle.header_size)
            answer, everyone, lost = yield from _perform(op, bundle, collective, rank, world_size)
            flags |= answer.flags
            present |= answer.present
            for position, part in enumerate(parts):
                part.give_back(lost[position] if lost is not None else None)
                answers.update(part.replies(answer.parts[position], [other.parts[position] for other in everyone]))
        for i in ending:
            replies[i] = answers.pop(i)
        for i, reply in answers.items():
            requests[i] = running[i].send(reply)
    if not collective.carries_headers:
        answers_in_order = [replies[i].payload for i in range(len(units))]
        if not all_finite([payload.values for payload in answers_in_order if isinstance(payload, DensePayload)]):
            flags |= Flags.NONFINITE
    return Pending(entries, units, running, [replies[i] for i in range(len(units))], flags, present, collective.delay)


def _zero_unless_finite(entries: Sequence[Entry]) -> Flags:
    """What a rank has to say about its gradients.

    If they are not finite the step is lost on all ranks; this one still has to send messages of the right form.
    """
    if all_finite([entry.grad for entry in entries]):
        return Flags.NONE
    for entry in entries:
        entry.grad.zero_()
    return Flags.NONFINITE


def _average_within(
    entries: Sequence[Entry], collective: Collective, flags: Flags, present: int, rank: int, world_size: int
) -> Generator[Round | NativeRound, list[Payload], tuple[Flags, int]]:
    """Average gradients over the ranks of a node, in place and densely; what the node has to tell the others.

    All its ranks go on with the same bits, so that their compressors do the same.
    """
    groups: dict[torch.dtype, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.grad.dtype, []).append(entry)
    parts = [DensePayload.concat([DensePayload(entry.grad) for entry in group]) for group in groups.values()]
    answer = yield from collective.within(Bundle(tuple(parts), flags, present, len(entries)), rank, world_size)
    assert isinstance(answer, Bundle)
    for group, part in zip(groups.values(), answer.parts, strict=True):
        assert isinstance(part, DensePayload)
        for entry, piece in zip(group, part.values.split([entry.grad.numel() for entry in group]), strict=True):
            torch.div(piece, collective.ranks_per_node, out=entry.grad)
    return answer.flags, answer.present


def _by_operation(requests: Mapping[int, Request], cuts: bool) -> list[tuple[Op, list[list[int]]]]:
    """Positions by operation, in one order on all ranks; within it in groups that share a part.

    Where ranks own index ranges, each tensor is a part of its own, since a range of several tensors laid together is
    no range of any of them. So is each sparse one where sums are cut.
    """

    def part_key(i: int) -> str:
        apart = requests[i].op in (Op.SCATTER_SUM, Op.ALL_GATHER)
        apart = apart or (cuts and isinstance(requests[i].payload, SparsePayload))
        return f"{_part_key(requests[i].payload)}/{i if apart else ''}"

    order = sorted(requests, key=lambda i: (requests[i].op.value, _part_key(requests[i].payload), i))
    return [
        (op, [list(group) for _, group in groupby(members, key=part_key)])
        for op, members in groupby(order, key=lambda i: requests[i].op)
    ]


def _part_key(payload: Payload) -> str:
    """Payloads with the same key are concatenated into one part."""
    values = getattr(payload, "values", None)
    return f"{type(payload).__name__}/{values.dtype if isinstance(values, Tensor) else ''}"


@dataclass
class _Part:
    """Payloads of one kind, laid together in one part of a message.

    Attributes:
        members: Positions of the compressors that they come from.
        bounds: Where each begins and ends.
        payload: All of them, rounded once to what the wire carries.
        error: What the rounding took away.
    """

    members: list[int]
    bounds: list[int]
    payload: Payload
    error: Payload | None

    @classmethod
    def of(cls, pieces: list[tuple[int, Payload]], wire: Wire) -> _Part:
        """Lay payloads together in the order given."""
        members, payloads = [i for i, _ in pieces], [payload for _, payload in pieces]
        bounds = [0, *accumulate(payload.length for payload in payloads)]
        return cls(members, bounds, *type(payloads[0]).concat(payloads).rounded(wire))

    def give_back(self, lost: Payload | None) -> None:
        """Add what did not get through to what the rounding took away."""
        if lost is not None:
            self.error = lost if self.error is None else self.error.merge(lost)

    def replies(self, answer: Payload, everyone: Sequence[Payload]) -> dict[int, Reply]:
        """Cut an answer, and for GATHER everybody's part, back into one reply per compressor."""
        if len(self.members) == 1:
            return {self.members[0]: Reply(answer, self.error, tuple(everyone))}
        returned = self.error.split(self.bounds) if self.error is not None else [None] * len(self.members)
        columns = list(zip(*(other.split(self.bounds) for other in everyone), strict=True))
        return {
            i: Reply(piece, returned[k], columns[k] if columns else ())
            for k, (i, piece) in enumerate(zip(self.members, answer.split(self.bounds), strict=True))
        }


def _perform(
    op: Op, bundle: Bundle, collective: Collective, rank: int, world_size: int
) -> Generator[Round | NativeRound, list[Payload], tuple[Bundle, list[Bundle], tuple[Payload | None, ...] | None]]:
    """Carry out one operation on a bundle.

    Returns:
        The answer; for GATHER everybody's bundle in rank order; what of each part did not get through, if anything.
    """
    if op is Op.GATHER:
        gathered = yield from collective.gather(bundle, rank, world_size)
        everyone = [item for item in gathered if isinstance(item, Bundle)]
        answer = everyone[0]
        for other in everyone[1:]:
            answer = Bundle(answer.parts, answer.flags | other.flags, answer.present | other.present, answer.tensors)
        return answer, everyone, None
    result, lost = yield from collective.reduce(op, bundle, rank, world_size)
    assert isinstance(result, Bundle)
    return result, [], lost
