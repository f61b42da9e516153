"""The driver that plays all ranks."""

import pytest
import torch

from lightning_distlab.collectives import NativeRound, Receive, Ring, Round
from lightning_distlab.exchange.drivers import InProcessDriver, Link
from lightning_distlab.payloads import DensePayload, Op
from tests.helpers.payloads import as_vector, dense


def ones(size=2):
    return DensePayload(torch.ones(size))


def test_open_exchanges_advance_by_one_round_each_time_another_opens():
    seen = []

    def running(name, rank, rounds):
        for number in range(rounds):
            seen.append((name, rank, number))
            yield Round(((1 - rank, ones()),), (Receive(1 - rank, ones()),))
        return name

    driver = InProcessDriver(2)
    first = driver.open({r: running("a", r, 3) for r in range(2)}, (0, 0), "a")
    second = driver.open({r: running("b", r, 2) for r in range(2)}, (0, 1), "b")
    assert seen == [("a", 0, 0), ("a", 1, 0), ("b", 0, 0), ("b", 1, 0), ("a", 0, 1), ("a", 1, 1)]
    assert driver.finish(second) == {0: "b", 1: "b"}
    assert driver.finish(first) == {0: "a", 1: "a"}
    assert driver.ledger.account(0, "replicate", "a").steps == 3


def test_several_sums_open_at_once():
    world, ring = 3, Ring()
    driver = InProcessDriver(world, faithful=True)
    tickets = [
        driver.open({r: ring.run(Op.SUM, dense(r, size), r, world) for r in range(world)}, (0, size), ring.name)
        for size in (5, 6, 7)
    ]
    for size, ticket in reversed(list(zip((5, 6, 7), tickets, strict=True))):
        expected = torch.stack([as_vector(dense(r, size)) for r in range(world)]).sum(0)
        for result in driver.finish(ticket).values():
            torch.testing.assert_close(as_vector(result), expected)


def test_native_result_leaves_contributions_alone():
    def running(rank, payload):
        (result,) = yield NativeRound(Op.SUM, payload)
        return result

    payloads = [dense(r, 4) for r in range(3)]
    before = [p.values.clone() for p in payloads]
    InProcessDriver(3).run({r: running(r, payloads[r]) for r in range(3)})
    assert all(torch.equal(p.values, b) for p, b in zip(payloads, before, strict=True))


def scripted(*rounds):
    yield from rounds


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (
            [[Round()], [Round((), (Receive(0, ones()),))]],
            "rank 1 waits for rank 0, which sends nothing",
        ),
        ([[Round(((1, ones()),))], [Round()]], "nobody receives the messages of ranks 0 to 1"),
        ([[Round()], []], r"ranks \[1\] ended before the others"),
        ([[Round(((1, ones()), (1, ones())))], [Round((), (Receive(0, ones()),))]], "two messages to the same peer"),
        ([[Round()], [NativeRound(Op.SUM, ones())]], "do not agree on what to do"),
        ([[NativeRound(Op.MAX, ones())], [NativeRound(Op.SUM, ones())]], "do not agree on what to do"),
    ],
)
def test_rounds_that_do_not_match_are_reported(ranks, message):
    with pytest.raises(AssertionError, match=message):
        InProcessDriver(2).run({r: scripted(*rounds) for r, rounds in enumerate(ranks)}, "broken")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(latency_s=-1.0), "latency_s=-1.0 must be"),
        (lambda: Link(latency_s=float("nan")), "latency_s=nan must be"),
        (lambda: Link(bandwidth_bytes_per_s=0.0), "bandwidth_bytes_per_s=0.0 must be greater"),
        (lambda: InProcessDriver(0), "world_size=0 must be at least 1"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
