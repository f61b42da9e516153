"""Clocks of ranks that wait for each other: closed forms, and the lecture's tables."""

import math

import numpy as np
import pytest

from lightning_distlab.simulation import Schedule, step_seconds


@pytest.mark.parametrize("ranks", [2, 7, 100])
@pytest.mark.parametrize(("waiting", "busy"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.5), (2.0, 1.0)])
def test_waiting_for_every_exchange(ranks, waiting, busy):
    assert step_seconds(Schedule(), ranks, 0.1, waiting, busy) == pytest.approx(0.1 + waiting + busy)


@pytest.mark.parametrize("period", [1, 5, 10])
def test_waiting_for_every_kth(period):
    steps = 200
    assert step_seconds(Schedule(period), 4, 0.1, 0.7, 0.3, steps=steps) == pytest.approx(0.1 + 1.0 / period)


@pytest.mark.parametrize(("delay", "waiting", "busy", "expected"), [
    (20, 1.5, 0.0, 0.1),  # hidden: 20 steps of 0.1 s are longer than the way
    (10, 3.0, 0.0, 3.1 / 11),  # the way itself: an exchange is begun before its step waits, so eleven are under way
    (10, 0.0, 0.4, 0.4),  # the links are always busy
    (1, 0.05, 0.0, 0.1),
])  # fmt: skip
def test_late_averages(delay, waiting, busy, expected):
    steps = 4000  # long enough that the drain at the end does not count
    found = step_seconds(Schedule(1, delay), 8, 0.1, waiting, busy, steps=steps)
    assert found == pytest.approx(expected, rel=0.005)


def test_one_rank_waits_for_nobody():
    assert step_seconds(Schedule(), 1, 0.1, 5.0, 5.0) == pytest.approx(0.1)


def test_the_drain_is_counted():
    assert step_seconds(Schedule(1, 50), 2, 0.1, 3.0, 0.0, steps=10) == pytest.approx((10 * 0.1 + 3.0) / 10)


def test_stragglers_cost_the_mean_of_the_slowest():
    ranks, jitter, steps = 64, 0.3, 3000
    draws = np.exp(np.random.default_rng(5).normal(-0.5 * jitter**2, jitter, (20_000, ranks)))
    expected = draws.max(1).mean()
    assert step_seconds(Schedule(), ranks, 1.0, 0.0, 0.0, jitter=jitter, steps=steps) == pytest.approx(
        expected, rel=0.02
    )
    late = step_seconds(Schedule(1, 20), ranks, 1.0, 0.0, 0.0, jitter=jitter, steps=steps)
    assert 1.0 <= late < 0.7 * expected  # who is slow once catches up within the delay


def test_many_ranks():
    assert step_seconds(Schedule(), 100_000, 0.1, 0.05, 0.0, jitter=0.1, steps=20) > 0.15


@pytest.mark.parametrize(
    ("latency", "slowdown"), [(1e-6, 1.0), (1e-3, 1.0), (10e-3, 1.07), (0.1, 1.4), (0.5, 3.5), (1.0, 5.8)]
)
def test_slowdown_by_latency(latency, slowdown):
    """205 ms of computing a step and one exchange that waits for the latency."""
    found = step_seconds(Schedule(), 2, 0.205, latency, 0.0) / 0.205
    assert found == pytest.approx(slowdown, rel=0.10)


CELLS = {
    "vision": (10.6, {5: (1.0, 0.6, 1.5, 2.6), 10: (1.0, 0.9, 1.9, 3.8)}, (1.0, 1.7, 3.7, 7.1), 0.13),
    "language": (8.75, {5: (1.0, 0.7, 1.4, 3.0), 10: (1.0, 1.0, 2.2, 4.2)}, (1.1, 1.9, 3.9, 7.5), 0.07),
}
NODES = (1, 2, 4, 8)


@pytest.mark.parametrize("task", CELLS)
def test_speedups_of_federated_averaging_and_delayed_averages(task):
    """Latency in local steps and, for the delayed averages, the share of computing that messages cost."""
    latency, fedavg, dga, overhead = CELLS[task]
    for period, printed in fedavg.items():
        for nodes, speedup in zip(NODES, printed, strict=True):
            found = nodes / step_seconds(Schedule(period), nodes, 1.0, latency, 0.0, steps=1000)
            assert found == pytest.approx(speedup, rel=0.15), (period, nodes)
    for nodes, speedup in zip(NODES, dga, strict=True):
        found = nodes / step_seconds(Schedule(5, 20, overhead), nodes, 1.0, latency, 0.0, steps=2000)
        assert found == pytest.approx(speedup, rel=0.15), nodes


@pytest.mark.parametrize(
    "bad", [{"compute_s": -1}, {"waiting_s": math.inf}, {"jitter": math.nan}, {"ranks": 0}, {"steps": 0}]
)
def test_bad_numbers_are_refused(bad):
    arguments = {"schedule": Schedule(), "ranks": 2, "compute_s": 1.0, "waiting_s": 0.0, "busy_s": 0.0, **bad}
    with pytest.raises(ValueError, match=next(iter(bad))):
        step_seconds(**arguments)


@pytest.mark.parametrize("bad", [{"period": 0}, {"delay": -1}, {"overhead": 1.0}])
def test_bad_schedules_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Schedule(**bad)
