"""Ranks that step by themselves and swap their own updates for the mean: local SGD, and delayed averages.

FedAvg (McMahan et al., AISTATS 2017) waits for the mean of every `period` local steps; Delayed Gradient Averaging (Zhu
et al., NeurIPS 2021) goes on and takes it in `delay` steps later. Both are one rule:

    w ← w - u_i                        the optimizer's own step i, whatever optimizer it is
    send Σ u of the round              at the end of every `period` steps
    w ← w + Σ u - mean(Σ u)            when that round's mean is due, `delay` steps after its end

What is exchanged is what the optimizer has subtracted, not the gradient: so the swap is exact for momentum, Adam, any
schedule, clipping and weight decay. Over the ranks the corrections Σ u - mean(Σ u) add up to zero, so they never move
the mean of the replicas, and replicas differ by their updates of the last `delay` steps and of the round under way
only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_distlab.collectives import Gather
from lightning_distlab.collectives.base import Collective
from lightning_distlab.exchange.driver import Driver, Ticket
from lightning_distlab.payloads import DensePayload, Op, Payload


@dataclass
class _Round:
    """A round whose mean is under way.

    Attributes:
        due: Step at whose end the mean has to be there.
        own: By rank, what it has contributed, [numel].
        ticket: The exchange.
    """

    due: int
    own: dict[int, Tensor]
    ticket: Ticket


class LocalUpdates:
    """Keeps replicas together that step by themselves.

        updates = LocalUpdates(driver, {rank: list(model.parameters())}, period=5, delay=20)
        for batch in data:
            optimizer.zero_grad(); loss(batch).backward(); optimizer.step()
            updates.after_step()
        updates.drain()

    A rank that skips a step (its update is zero) still calls `after_step`, and so stays in step with the others.

    Memory: a copy of the weights as they were after the last step, the sum of the round under way, and what was sent in
    each of the ⌈delay / period⌉ + 1 rounds that may be in flight.

    Args:
        driver: Who carries the messages, for the ranks that this process plays.
        weights: The parameters of each of these ranks, of one dtype and device; changed in place.
        collective: How means are made. A direct exchange (the default) is one round, and so costs one delay of the link
            however many ranks there are; a ring needs somebody to forward its messages, which happens in `after_step`.
        period: Steps of a round (K). 1 exchanges every step.
        delay: Steps from the end of a round to the use of its mean (D). 0 waits for it at once.
        corrected: Off: a rank takes back its own step and moves by the delayed means alone, to compare with. Stable
            only for small delays: on curvature λ while lr λ < 2 sin(π / (2 (2 D + 1))).

    Raises:
        ValueError: An option is out of range, or parameters differ in dtype.
    """

    def __init__(
        self,
        driver: Driver,
        weights: Mapping[int, list[Tensor]],
        collective: Collective | None = None,
        *,
        period: int = 1,
        delay: int = 0,
        corrected: bool = True,
    ) -> None:
        for name, value, least in (("period", period, 1), ("delay", delay, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be an integer of at least {least}.")
        if set(weights) != set(driver.ranks):
            raise ValueError(f"weights are given for ranks {sorted(weights)}, the driver plays {sorted(driver.ranks)}.")
        if len({weight.dtype for own in weights.values() for weight in own}) > 1:
            raise ValueError("weights must have one dtype; use one LocalUpdates for each.")
        self.driver = driver
        self.weights = {rank: [weight.detach() for weight in own] for rank, own in weights.items()}
        self.collective = collective or Gather()
        self.collective.check_world(driver.world_size)
        self.period = period
        self.delay = delay
        self.corrected = corrected
        self.steps = 0
        self._reference = {rank: self._flat(rank) for rank in driver.ranks}
        self._sum = {rank: torch.zeros_like(flat) for rank, flat in self._reference.items()}
        self._rounds: deque[_Round] = deque()
        self._sent = 0

    @property
    def in_flight(self) -> int:
        """Rounds whose mean is under way."""
        return len(self._rounds)

    def after_step(self) -> None:
        """Take note of what the optimizer has subtracted; begin and end the exchanges that are due."""
        for rank, reference in self._reference.items():
            update = reference - self._flat(rank)
            self._sum[rank] += update
            if self.corrected:
                reference.sub_(update)
            else:
                self._write(rank)
        if (self.steps + 1) % self.period == 0:
            self._begin()
        while self._rounds and self._rounds[0].due <= self.steps:
            self._end()
        self.steps += 1

    def drain(self) -> None:
        """Exchange what is left of the round under way, wait for all means, and make all replicas one.

        Their weights are averaged at the end: what they differ by then is rounding, and afterwards it is nothing.
        """
        if self.steps % self.period:
            self._begin()
        while self._rounds:
            self._end()
        mean = self._mean(self._open({rank: flat.clone() for rank, flat in self._reference.items()}))
        for rank, total in mean.items():
            self._reference[rank].copy_(total)
            self._write(rank)

    def _begin(self) -> None:
        """Send the round's sum, and begin another one."""
        own = {rank: total.clone() for rank, total in self._sum.items()}
        for total in self._sum.values():
            total.zero_()
        self._rounds.append(_Round(self.steps + self.delay, own, self._open(own)))

    def _end(self) -> None:
        """Swap a round's own sum for its mean."""
        finished = self._rounds.popleft()
        for rank, mean in self._mean(finished.ticket).items():
            if self.corrected:
                self._reference[rank] += finished.own[rank]
            self._reference[rank] -= mean
            self._write(rank)

    def _open(self, vectors: Mapping[int, Tensor]) -> Ticket:
        world, self._sent = self.driver.world_size, self._sent + 1
        running = {
            rank: self.collective.run(Op.SUM, DensePayload(vector), rank, world) for rank, vector in vectors.items()
        }
        return self.driver.open(running, (self._sent, 0), f"local updates, {self.collective.name}")

    def _mean(self, ticket: Ticket) -> dict[int, Tensor]:
        totals: Mapping[int, Payload] = self.driver.finish(ticket)
        means = {}
        for rank, total in totals.items():
            assert isinstance(total, DensePayload)
            means[rank] = (total.values / self.driver.world_size).to(self._reference[rank].dtype)
        return means

    def _flat(self, rank: int) -> Tensor:
        """This rank's weights as they are, copied into one vector."""
        return torch.cat([weight.reshape(-1) for weight in self.weights[rank]])

    def _write(self, rank: int) -> None:
        """Weights from the reference."""
        start = 0
        for weight in self.weights[rank]:
            weight.copy_(self._reference[rank][start : start + weight.numel()].view(weight.shape))
            start += weight.numel()
