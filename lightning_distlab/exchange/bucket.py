"""One bucket of tensors on one rank: all its compressors in lock step, one message a round."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isfinite

import torch
from torch import Tensor

from lightning_distlab.collectives.base import Collective, NativeRound, Round
from lightning_distlab.compression.base import Compression, Compressor, Param, State, Step
from lightning_distlab.exchange.flat import adjacent_runs, joined
from lightning_distlab.exchange.ledger import Ledger
from lightning_distlab.payloads import Bundle, DensePayload, Flags, Op, Payload, Reply, Request, Wire


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
    """

    entries: Sequence[Entry]
    units: list[list[int]]
    running: list[Compression]
    replies: list[Reply]
    flags: Flags
    present: int

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
) -> Generator[Round | NativeRound, list[Payload], Pending]:
    """Run the compressors of a bucket up to their final replies.

    Args:
        entries: The tensors, in an order that all ranks share.
        compressor: The method.
        collective: The algorithm.
        wire: Codecs.
        step: The step under way, as this rank sees it.
        flags: What this rank has to tell the others.
        ledger: Where this rank's own payload bytes are counted, if at all.

    Returns:
        The bucket, waiting for the verdict on the step.
    """
    present = sum(1 << position for position, entry in enumerate(entries) if entry.present)
    if collective.carries_headers and not all_finite([entry.grad for entry in entries]):
        # The step is lost on all ranks; this one still has to send messages of the right form.
        flags |= Flags.NONFINITE
        for entry in entries:
            entry.grad.zero_()
    units = _units(entries, compressor)
    running = []
    for positions in units:
        first = entries[positions[0]]
        grad = joined([entries[position].grad for position in positions])
        running.append(compressor.exchange(grad, first.state, first.param, step))
    requests: list[Request] = [next(generator) for generator in running]
    replies: dict[int, Reply] = {}
    waiting = list(range(len(units)))
    while waiting:
        answers: dict[int, Reply] = {}
        for op, members in _by_operation(waiting, requests):
            parts, errors = _assemble([requests[i].payload for i in members], wire)
            bundle = Bundle(parts, flags, present, len(entries))
            if ledger is not None:
                ledger.payload_bytes += bundle.wire_size() - (0 if collective.carries_headers else bundle.header_size)
            answer, everyone = yield from _perform(op, bundle, collective, step)
            flags |= answer.flags
            present |= answer.present
            for i, reply in zip(members, _take_apart(members, requests, answer, everyone, errors), strict=True):
                answers[i] = reply
        for i in list(waiting):
            if requests[i].final:
                replies[i] = answers[i]
                waiting.remove(i)
            else:
                requests[i] = running[i].send(answers[i])
    if not collective.carries_headers:
        answers_in_order = [replies[i].payload for i in range(len(units))]
        if not all_finite([payload.values for payload in answers_in_order if isinstance(payload, DensePayload)]):
            flags |= Flags.NONFINITE
    return Pending(entries, units, running, [replies[i] for i in range(len(units))], flags, present)


def _by_operation(waiting: list[int], requests: list[Request]) -> list[tuple[Op, list[int]]]:
    """Positions grouped by operation, in one order on all ranks; within it by what can share a part."""
    order = sorted(waiting, key=lambda i: (requests[i].op.value, _part_key(requests[i].payload), i))
    return [(op, list(members)) for op, members in groupby(order, key=lambda i: requests[i].op)]


def _part_key(payload: Payload) -> str:
    """Payloads with the same key are concatenated into one part."""
    values = getattr(payload, "values", None)
    return f"{type(payload).__name__}/{values.dtype if isinstance(values, Tensor) else ''}"


def _assemble(payloads: list[Payload], wire: Wire) -> tuple[tuple[Payload, ...], list[Payload | None]]:
    """Concatenate payloads of a kind (they come sorted), then round each part once; the parts and their errors."""
    parts, errors = [], []
    for _, group in groupby(payloads, key=_part_key):
        pieces = list(group)
        part, error = type(pieces[0]).concat(pieces).rounded(wire)
        parts.append(part)
        errors.append(error)
    return tuple(parts), errors


def _perform(
    op: Op, bundle: Bundle, collective: Collective, step: Step
) -> Generator[Round | NativeRound, list[Payload], tuple[Bundle, list[Bundle]]]:
    """Carry out one operation on a bundle; the answer, and for GATHER everybody's bundle in rank order."""
    if op is Op.GATHER:
        gathered = yield from collective.gather(bundle, step.rank, step.world_size)
        everyone = [item for item in gathered if isinstance(item, Bundle)]
        answer = everyone[0]
        for other in everyone[1:]:
            answer = Bundle(answer.parts, answer.flags | other.flags, answer.present | other.present, answer.tensors)
        return answer, everyone
    result = yield from collective.run(op, bundle, step.rank, step.world_size)
    assert isinstance(result, Bundle)
    return result, []


def _take_apart(
    members: list[int], requests: list[Request], answer: Bundle, everyone: list[Bundle], errors: list[Payload | None]
) -> list[Reply]:
    """Cut the parts of an answer back into one reply per tensor."""
    replies: list[Reply] = []
    groups = [list(g) for _, g in groupby(members, key=lambda i: _part_key(requests[i].payload))]
    for position, group in enumerate(groups):
        bounds = [0]
        for i in group:
            bounds.append(bounds[-1] + requests[i].payload.length)
        error = errors[position]
        returned = error.split(bounds) if error is not None else [None] * len(group)
        results = answer.parts[position].split(bounds)
        columns = [other.parts[position].split(bounds) for other in everyone]
        for k in range(len(group)):
            replies.append(Reply(results[k], returned[k], tuple(column[k] for column in columns)))
    return replies
