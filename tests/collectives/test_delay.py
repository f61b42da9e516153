"""The parameter server with bounded delay."""

import pytest
import torch

from lightning_distlab.collectives import ParameterServer
from lightning_distlab.compression import DGC, NoCompression, Param
from lightning_distlab.exchange.drivers import InProcessDriver
from lightning_distlab.exchange.engine import Engine
from tests.compression.harness import EXACT, snapshot

F = torch.float64
SHAPES = {"a": (30, 20), "b": (7,)}


def engine(make, delay):
    params = {n: Param(n, torch.zeros(s, dtype=F)) for n, s in SHAPES.items()}
    return Engine(make(), ParameterServer(delay=delay), InProcessDriver(3), params, EXACT)


def step(running, number, bad=False):
    generator = torch.Generator().manual_seed(number)
    grads = {r: {n: torch.randn(s, generator=generator, dtype=F) for n, s in SHAPES.items()} for r in range(3)}
    if bad:
        grads[1]["a"][0, 0] = torch.inf
    running.begin()
    running.submit(grads)
    outcome = running.finish()
    for rank in range(1, 3):
        assert outcome.skipped or all(torch.equal(grads[rank][n], grads[0][n]) for n in SHAPES)
    return outcome.skipped, grads[0]


@pytest.mark.parametrize("make", [NoCompression, lambda: DGC(density=0.1)])
@pytest.mark.parametrize("delay", [1, 3])
def test_averages_come_that_many_steps_later(make, delay):
    prompt, late = engine(make, 0), engine(make, delay)
    expected = [step(prompt, number)[1] for number in range(8)]
    for number in range(8):
        _, average = step(late, number)
        for n, shape in SHAPES.items():
            then = expected[number - delay][n] if number >= delay else torch.zeros(shape, dtype=F)
            assert torch.equal(average[n], then)


def test_a_skipped_step_delays_nothing():
    late, twin = engine(NoCompression, 2), engine(NoCompression, 2)
    for number in range(3):
        step(late, number)
        step(twin, number)
    assert step(late, 99, bad=True)[0]
    assert all(torch.equal(step(late, number)[1]["a"], step(twin, number)[1]["a"]) for number in range(3, 6))


def test_what_waits_is_part_of_the_state():
    first = engine(NoCompression, 2)
    for number in range(4):
        step(first, number)
    second = engine(NoCompression, 2)
    for rank, states in enumerate(snapshot(first.states.values())):
        second.load_state(rank, states)
    for number in range(4, 7):
        assert torch.equal(step(first, number)[1]["a"], step(second, number)[1]["a"])


@pytest.mark.parametrize("delay", [-1, 1.5, None, True])
def test_a_bad_delay_is_refused(delay):
    with pytest.raises(ValueError, match=f"delay={delay!r} must be"):
        ParameterServer(delay=delay)
