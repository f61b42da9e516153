"""When each of many ranks ends each of its steps, if computing and messages take so long."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Schedule:
    """When ranks exchange, and when they need what they have exchanged.

    Attributes:
        period: Local steps between exchanges (K).
        delay: Steps after an exchange was begun until its result must be there (D); 0 waits for it at once.
        overhead: Share of a step's computing that handling messages under way costs.

    Raises:
        ValueError: A number out of range.
    """

    period: int = 1
    delay: int = 0
    overhead: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.period < 1:
            raise ValueError(f"period={self.period!r} must be at least 1.")
        if self.delay < 0:
            raise ValueError(f"delay={self.delay!r} must be at least 0.")
        if not 0 <= self.overhead < 1:
            raise ValueError(f"overhead={self.overhead!r} must lie in [0, 1).")


def step_seconds(
    schedule: Schedule,
    ranks: int,
    compute_s: float,
    waiting_s: float,
    busy_s: float,
    *,
    jitter: float = 0.0,
    steps: int = 200,
    seed: int = 0,
) -> float:
    """Mean time of a step, by playing all ranks' clocks.

    An exchange begins when the last rank has reached it and the links are free of the one before, keeps them busy for
    `busy_s`, and has arrived `waiting_s` after that everywhere. At the end of the last of every `period` steps an
    exchange is begun; at the end of the step `delay` later each rank waits until it has arrived. Exchanges that are
    still under way at the end are waited for (the drain), and their time is counted.

    Args:
        schedule: When to exchange, and when to wait.
        ranks: Number of ranks; 1 exchanges nothing.
        compute_s: Mean computing time of a step.
        waiting_s: Of an exchange: latency.
        busy_s: Of an exchange: transfer.
        jitter: Standard deviation of the logarithm of a rank's computing time, drawn anew for each step.
        steps: How many are played.
        seed: Of the draws.

    Raises:
        ValueError: A number out of range.
    """
    for name, value in (("compute_s", compute_s), ("waiting_s", waiting_s), ("busy_s", busy_s), ("jitter", jitter)):
        if not 0 <= value < np.inf:
            raise ValueError(f"{name}={value!r} must be a finite number, at least 0.")
    if ranks < 1 or steps < 1:
        raise ValueError(f"ranks={ranks!r} and steps={steps!r} must be at least 1.")
    generator = np.random.default_rng(seed)
    clocks: _Seconds = np.zeros(ranks)
    arrival: dict[int, float] = {}  # of the exchange begun in a step
    free = 0.0
    exchanges = ranks > 1
    for step in range(steps):
        clocks += _computing(generator, ranks, compute_s * (1 + (schedule.overhead if exchanges else 0.0)), jitter)
        if exchanges and (step + 1) % schedule.period == 0:
            begins = max(float(clocks.max()), free)
            free = begins + busy_s
            arrival[step] = free + waiting_s
        due = arrival.pop(step - schedule.delay, None)
        if due is not None:
            np.maximum(clocks, due, out=clocks)
    end = max([float(clocks.max()), *arrival.values()])
    return end / steps


def _computing(generator: np.random.Generator, ranks: int, mean: float, jitter: float) -> _Seconds | float:
    """Computing times of a step: log-normal around their mean."""
    if not jitter:
        return mean
    drawn: _Seconds = np.exp(generator.normal(-0.5 * jitter**2, jitter, ranks))
    return mean * drawn
