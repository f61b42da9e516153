"""Named gradients in, named averages out."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_distlab.collectives.base import Collective, NativeRound, Round
from lightning_distlab.compression.base import Compressor, Param, Scratch, State, Step
from lightning_distlab.exchange.bucket import DELAYED, Entry, Pending, exchange_bucket
from lightning_distlab.exchange.driver import Driver, Ticket
from lightning_distlab.exchange.flat import flat_view, shaped_view
from lightning_distlab.exchange.ledger import Ledger
from lightning_distlab.payloads import DensePayload, Flags, Op, Payload, Wire
from lightning_distlab.payloads.dense import exact_codec

Gradients = Mapping[int, Mapping[str, Tensor | None]]
"""Gradients of the ranks that this process plays: by rank, then by parameter name; None where a rank has none."""


@dataclass
class Outcome:
    """How a step ended.

    Attributes:
        skipped: A gradient was not finite on some rank: nothing was averaged, no state changed.
        signal: Some rank was asked to stop.
        created: By rank and name, averages for parameters that had no gradient on this rank but on another.
        absent: Names that had a gradient on no rank.
    """

    skipped: bool = False
    signal: bool = False
    created: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)


@dataclass
class _OpenBucket:
    """A bucket under way.

    Attributes:
        ticket: Its exchange.
        names: Its tensors.
        present: By rank, 1 where that rank has a gradient.
    """

    ticket: Ticket
    names: Sequence[str]
    present: dict[int, list[bool]]


class Engine:
    """Compresses, exchanges and averages gradients, for one rank or for all virtual ranks of a process.

    A step is `begin`, one `submit` per bucket (in the same order on all ranks), `finish`. Until `finish` has heard
    from all ranks that every gradient is finite, no state changes, and a gradient at most by the average of its
    node or, where it is not finite, to zero.

    Args:
        compressor: What is sent.
        collective: How it is summed.
        driver: Who carries the messages.
        params: All parameters that may be exchanged, by name.
        wire: Codecs.
        seed: Seed of the run, for sampling.
    """

    def __init__(
        self,
        compressor: Compressor,
        collective: Collective,
        driver: Driver,
        params: dict[str, Param],
        wire: Wire | None = None,
        seed: int = 0,
    ) -> None:
        collective.check_world(driver.world_size)
        self.compressor = compressor
        self.collective = collective
        self.driver = driver
        self.params = params
        self.wire = wire or Wire()
        self.seed = seed
        self.steps_done = 0
        self.states: dict[int, dict[str, State]] = {
            rank: {name: self._new_state(param) for name, param in self.params.items()} for rank in driver.ranks
        }
        self._scratch = Scratch()
        self._steps: dict[int, Step] = {}
        self._flags = Flags.NONE
        self._open: list[_OpenBucket] = []
        self._cheaper: dict[float, bool] = {}

    @property
    def ledger(self) -> Ledger:
        """The driver's books."""
        return self.driver.ledger

    def begin(self, *, epoch: float = 0.0, signal: bool = False) -> None:
        """Open a step.

        Args:
            epoch: Epochs done, as a fraction.
            signal: This rank was asked to stop; all ranks will know after `finish`.
        """
        assert not self._open, "the step before was not finished"
        self._flags = Flags.SIGNAL if signal else Flags.NONE
        places = {rank: self.collective.contributor(rank, self.driver.world_size) for rank in self.driver.ranks}
        self._steps = {
            rank: Step(
                index=self.steps_done,
                epoch=epoch,
                rank=places[rank][0],
                world_size=places[rank][1],
                seed=self.seed,
                scratch=self._scratch,
                dense_is_cheaper=self._dense_is_cheaper,
            )
            for rank in self.driver.ranks
        }
        if not self.compressor.needs_whole_gradient:
            for rank, step in self._steps.items():
                step.observed = self.compressor.observe({}, self.states[rank], step)

    def observe(self, gradients: Gradients) -> None:
        """Show the compressor each rank's whole gradient, for methods that need it before the first bucket."""
        started = time.perf_counter()
        for rank, named in gradients.items():
            flat = {name: flat_view(grad) for name, grad in named.items() if grad is not None}
            self._steps[rank].observed = self.compressor.observe(flat, self.states[rank], self._steps[rank])
        self.ledger.codec_s += time.perf_counter() - started

    def submit(self, gradients: Gradients) -> None:
        """Start the exchange of a bucket. The gradients (contiguous) become averages, in place, in `finish`."""
        names = list(next(iter(gradients.values())))
        key = (self.steps_done, len(self._open))
        running = {}
        for rank in self.driver.ranks:
            entries = [self._entry(rank, name, gradients[rank][name]) for name in names]
            first = rank == self.driver.ranks[0]
            if first:
                self.ledger.dense_bytes += sum(entry.grad.numel() * entry.grad.element_size() for entry in entries)
            running[rank] = exchange_bucket(
                entries,
                self.compressor,
                self.collective,
                self.wire,
                self._steps[rank],
                self._flags,
                self.ledger if first else None,
                (rank, self.driver.world_size),
            )
        present = {rank: [gradients[rank][name] is not None for name in names] for rank in self.driver.ranks}
        self._open.append(_OpenBucket(self.driver.open(running, key, self.collective.name), names, present))

    def finish(self) -> Outcome:
        """Wait for all buckets, hear whether the step is good, then change state and gradients, or nothing."""
        flags_ticket = None if self.collective.carries_headers else self._open_flags()
        buckets: list[dict[int, Pending]] = [self.driver.finish(bucket.ticket) for bucket in self._open]
        flags, present = Flags.NONE, []
        for pendings in buckets:
            bits = 0
            for pending in pendings.values():
                flags |= pending.flags
                bits |= pending.present
            present.append(bits)
        if flags_ticket is not None:
            agreed = next(iter(self.driver.finish(flags_ticket).values()))
            flags |= Flags.SIGNAL if agreed[0] else Flags.NONE
            present = _bits_per_bucket(agreed[1:], [len(bucket.names) for bucket in self._open])
        outcome = Outcome(skipped=bool(flags & Flags.NONFINITE), signal=bool(flags & Flags.SIGNAL))
        started = time.perf_counter()
        for pendings, bits in zip(buckets, present, strict=True):
            for rank, pending in pendings.items():
                self._settle(rank, pending, bits, outcome)
        self.ledger.codec_s += time.perf_counter() - started
        self.ledger.steps += 1
        self.ledger.skipped_steps += outcome.skipped
        self.steps_done += 1
        self._open = []
        return outcome

    def _settle(self, rank: int, pending: Pending, present: int, outcome: Outcome) -> None:
        """Commit or abandon a rank's bucket and note what came of it."""
        if outcome.skipped:
            pending.abandon()
            return
        averaged = pending.commit(present)
        for entry in averaged:
            if not entry.present:
                average = shaped_view(entry.grad, entry.param.weight)
                outcome.created.setdefault(rank, {})[entry.param.name] = average
        if rank == self.driver.ranks[0]:
            names = {entry.param.name for entry in averaged}
            outcome.absent += [e.param.name for e in pending.entries if e.param.name not in names]

    def _entry(self, rank: int, name: str, grad: Tensor | None) -> Entry:
        """A tensor of a bucket, with zeros where this rank has no gradient."""
        param = self.params[name]
        if grad is None:
            zeros = torch.zeros(param.weight.numel(), dtype=param.weight.dtype, device=param.weight.device)
            return Entry(param, zeros, self.states[rank][name], present=False)
        return Entry(param, flat_view(grad), self.states[rank][name])

    def _open_flags(self) -> Ticket:
        """Agree on flags where messages have no headers: one small maximum, under way beside the last bucket."""
        running = {}
        for rank in self.driver.ranks:
            bits = [bool(self._flags & Flags.SIGNAL)]
            for bucket in self._open:
                bits += bucket.present[rank]
            running[rank] = _maximum(torch.tensor(bits, dtype=torch.float32, device=self._device))
        return self.driver.open(running, (self.steps_done, len(self._open)), "flags")

    @property
    def _device(self) -> torch.device:
        return next(iter(self.params.values())).weight.device

    def _dense_is_cheaper(self, density: float) -> bool:
        """Whether this share of entries costs more bytes on this collective than all of them."""
        if density not in self._cheaper:
            self._cheaper[density] = density >= 1.0 or self._compare_with_dense(density)
        return self._cheaper[density]

    def _compare_with_dense(self, density: float) -> bool:
        world, elements = self.driver.world_size, 1 << 20
        wire = self.wire.resolved(exact_codec(next(iter(self.params.values())).weight.dtype))
        dense_bytes = wire.dense_codec.size(elements) / elements
        entry = wire.value_codec.size(elements) / elements + _index_bits(wire.index, density) / 8
        sparse = self.collective.sum_bytes(world, elements, density, entry, dense_bytes)
        return sparse >= self.collective.sum_bytes(world, elements, 1.0, entry, dense_bytes) > 0

    def _new_state(self, param: Param) -> State:
        """Fresh memory of a parameter on one rank."""
        state = self.compressor.init_state(param)
        if self.collective.delay:
            state[DELAYED] = torch.zeros(
                self.collective.delay * param.weight.numel(), dtype=param.weight.dtype, device=param.weight.device
            )
        return state

    def register(self, param: Param) -> None:
        """Add a parameter that began to take part (unfrozen, say), with fresh memory on all ranks."""
        self.params[param.name] = param
        for rank in self.driver.ranks:
            self.states[rank][param.name] = self._new_state(param)

    def unregister(self, name: str) -> None:
        """Drop a parameter that no longer takes part, and its memory."""
        del self.params[name]
        for rank in self.driver.ranks:
            del self.states[rank][name]

    def state_dict(self, rank: int) -> dict[str, State]:
        """A rank's memory, by parameter name."""
        return self.states[rank]

    def load_state(self, rank: int, states: Mapping[str, State]) -> None:
        """Put copies of what was saved into a rank's memory; parameters and keys that are not named keep theirs.

        Raises:
            ValueError: A memory has another size than this run's options give it, or averages wait that would be lost.
        """
        for name, state in states.items():
            own = self.states[rank][name]
            for key, value in state.items():
                fits = own[key].numel() == value.numel() if key in own else key != DELAYED
                if not fits:
                    size = own[key].numel() if key in own else "none"
                    raise ValueError(
                        f"{name}: the checkpoint's {key!r} has {value.numel()} elements, this run's {size}: an option "
                        "of the compressor or the collective has changed. Use the options of the run that was saved, "
                        "or comm_state='reset' (strategy.comm_state=reset) to start with empty memories."
                    )
            own.update({key: value.clone() for key, value in state.items()})


def _maximum(values: Tensor) -> Generator[Round | NativeRound, list[Payload], list[bool]]:
    """Elementwise maximum of a small vector over ranks, by the backend."""
    (result,) = yield NativeRound(Op.MAX, DensePayload(values))
    assert isinstance(result, DensePayload)
    return [bool(value) for value in result.values.tolist()]


def _bits_per_bucket(present: Sequence[bool], sizes: Sequence[int]) -> list[int]:
    """Cut a flat list of truths into one bit field per bucket."""
    fields, start = [], 0
    for size in sizes:
        fields.append(sum(1 << i for i in range(size) if present[start + i]))
        start += size
    return fields


def _index_bits(codec: str, density: float) -> float:
    """Bits per index at a density, for deciding what is cheaper: raw 32, run length 16, else the entropy + 2 %."""
    if codec in ("int32", "run16"):
        return 32.0 if codec == "int32" else 16.0
    if codec == "bitmap":
        return 1 / density
    entropy = -density * math.log2(density) - (1 - density) * math.log2(1 - density)
    return 1.02 * entropy / density
