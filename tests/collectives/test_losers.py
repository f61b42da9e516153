"""Algorithms that cut sums: the agreed number of entries, the same on all ranks, and nothing lost."""

import pytest
import torch

from lightning_distlab.collectives import COLLECTIVES, Balanced, GTopK
from lightning_distlab.compression import DGC, Hyper, Param, Sparse, Threshold
from lightning_distlab.exchange.drivers import InProcessDriver
from lightning_distlab.exchange.engine import Engine
from lightning_distlab.payloads import Bundle, Flags, Op, SparsePayload, Wire
from tests.compression.harness import EXACT, random_grads
from tests.helpers.payloads import bits, dense, sparse
from tests.payloads.test_quanta import some as quanta

WORLDS = (1, 2, 3, 4, 5, 6, 8)
F = torch.float64
NAMES = ("gtopk", "balanced")


def play(name, payloads, faithful=True):
    world, collective = len(payloads), COLLECTIVES[name]()
    driver = InProcessDriver(world, faithful=faithful)
    results = driver.run({r: collective.reduce(Op.SUM, payloads[r], r, world) for r in range(world)}, name)
    return [results[r] for r in range(world)], driver


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("size", [1, 7, 64, 301])
@pytest.mark.parametrize("name", NAMES)
def test_what_arrives_and_what_comes_back_is_what_was_sent(name, size, world):
    for entries in (1, max(1, size // 10), size):
        payloads = [
            Bundle((dense(r, size), sparse(r, size, entries), sparse(r + 50, 40, 5)), Flags.NONE, 0, 3)
            for r in range(world)
        ]
        results, _ = play(name, payloads)
        result = results[0][0]
        assert all(bits(other) == bits(result) for other, _ in results)
        torch.testing.assert_close(
            result.parts[0].values, torch.stack([p.parts[0].values for p in payloads]).sum(0), rtol=1e-14, atol=1e-14
        )
        for part in (1, 2):
            whole = torch.stack([p.parts[part].to_dense() for p in payloads]).sum(0)
            back = torch.zeros_like(whole)
            for rank, (_, lost) in enumerate(results):
                if lost is not None and lost[part] is not None:
                    back += lost[part].to_dense()
                    own = payloads[rank].parts[part].to_dense()
                    if world & (world - 1) == 0 or name == "balanced":  # a loser is returned to its owner, unchanged
                        at = lost[part].indices
                        torch.testing.assert_close(lost[part].values, own[at], rtol=0, atol=0)
            torch.testing.assert_close(result.parts[part].to_dense() + back, whole, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_no_more_entries_than_a_rank_may_send(name, world):
    payloads = [sparse(r, 400, 16) for r in range(world)]
    results, _ = play(name, payloads)
    assert 0 < results[0][0].indices.numel() <= 16


def test_gtopk_keeps_the_largest_of_a_merge():
    payloads = [sparse(r, 400, 16) for r in range(2)]
    results, _ = play("gtopk", payloads)
    whole = sum(p.to_dense() for p in payloads)
    assert results[0][0].indices.tolist() == whole.abs().topk(16).indices.sort().values.tolist()


def test_balanced_keeps_the_largest_complete_sums_of_each_range():
    world = 4
    payloads = [sparse(r, 400, 16) for r in range(world)]
    results, _ = play("balanced", payloads)
    whole = sum(p.to_dense() for p in payloads)
    expected = torch.cat(
        [100 * r + whole[100 * r : 100 * r + 100].abs().topk(4).indices.sort().values for r in range(world)]
    )
    assert torch.equal(results[0][0].indices, expected)
    torch.testing.assert_close(results[0][0].values, whole[expected], rtol=1e-15, atol=0)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", [GTopK, Balanced])
def test_dense_bytes_and_steps_are_the_formula(kind, world):
    _, driver = play(kind.name, [dense(rank, 37) for rank in range(world)])
    for rank in range(world):
        account = driver.ledger.account(rank, "replicate", kind.name)
        assert account.steps == kind().steps(world)
        assert account.bytes_sent == kind().sum_bytes(world, 37, 1.0, 16.0, 8.0, rank=rank)


def test_sparse_bytes_do_not_grow_with_the_number_of_ranks():
    """gTop-k: the same a step. Balanced: the same in all."""
    size, entries, wire = 100_000, 1000, Wire(index="int32", value="fp64", dense="fp64")
    per_step, whole = [], []
    for world in (4, 16):
        payloads = [sparse(r, size, entries, wire) for r in range(world)]
        _, driver = play("gtopk", payloads, faithful=False)
        account = driver.ledger.account(0, "replicate", "gtopk")
        per_step.append(account.bytes_sent / account.steps)
        _, driver = play("balanced", payloads, faithful=False)
        whole.append(max(driver.ledger.bytes_sent(r) for r in range(world)))
    assert per_step[0] == per_step[1]
    assert whole[1] < 1.45 * whole[0] < 1.45 * 2.2 * entries * 12


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("name", NAMES)
def test_counts_of_quanta(name, world):
    payloads = [quanta(200, 20 + r, r) for r in range(world)]
    results, _ = play(name, payloads)
    whole = torch.stack([p.to_dense() for p in payloads]).sum(0)
    back = torch.stack([lost[0].to_dense() for _, lost in results if lost is not None]).sum(0)
    assert torch.equal(results[0][0].to_dense() + back, whole)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("wire", [EXACT, Wire(value="int8")])
@pytest.mark.parametrize(
    "make",
    [lambda: Sparse(density=0.05, scope="tensor"), lambda: DGC(density=0.05), lambda: Threshold(threshold=1.0)],
)
@pytest.mark.parametrize("name", NAMES)
def test_residuals_take_losers_back(name, make, wire, world):
    """Sum of averages + mean of residuals = sum of mean gradients, whatever was cut and rounded on the way."""
    shapes = {"a": (30, 20), "b": (5, 7, 13)}
    params = {n: Param(n, torch.zeros(s, dtype=F), Hyper()) for n, s in shapes.items()}
    engine = Engine(make(), COLLECTIVES[name](), InProcessDriver(world, faithful=True), params, wire)
    weights = {n: torch.zeros(s, dtype=F) for n, s in shapes.items()}
    given = {n: torch.zeros(w.numel(), dtype=F) for n, w in weights.items()}
    got = {n: torch.zeros_like(g) for n, g in given.items()}
    for step in range(6):
        grads = random_grads(world, weights, step)
        for n in weights:
            given[n] += torch.stack([g[n] for g in grads]).mean(0)
        engine.begin()
        engine.submit({r: {n: g[n].view(shapes[n]) for n in shapes} for r, g in enumerate(grads)})
        assert not engine.finish().skipped
        for n in weights:
            assert all(torch.equal(g[n], grads[0][n]) for g in grads)
            got[n] += grads[0][n]
    for n in weights:
        key = "velocity" if isinstance(engine.compressor, DGC) else "residual"
        held = torch.stack([engine.states[r][n][key] for r in range(world)]).mean(0)
        torch.testing.assert_close(got[n] + held, given[n], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("size", "limit", "world"), [
    (6, 2, 2), (7, 1, 4), (12, 4, 4), (64, 4, 32), (130, 13, 64), (100, 90, 4), (600, 588, 3), (1000, 980, 4),
])  # fmt: skip
@pytest.mark.parametrize("name", NAMES)
def test_sums_that_travel_in_dense_form(name, size, limit, world):
    """They arrive with an entry everywhere, and a zero is no sign that a contribution has got through."""
    payloads = [sparse(r, size, limit, Wire(value="fp32"), torch.float32) for r in range(world)]
    whole = torch.stack([p.to_dense().double() for p in payloads]).sum(0)
    results, _ = play(name, payloads)
    back = sum(lost[0].to_dense().double() for _, lost in results if lost is not None)
    torch.testing.assert_close(results[0][0].to_dense().double() + back, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_contributions_that_cancel(name):
    first = SparsePayload(torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0, 5.0], dtype=F), 4, 3)
    second = SparsePayload(torch.tensor([3]), torch.tensor([-5.0], dtype=F), 4, 3)
    results, _ = play(name, [first, second])
    back = sum(lost[0].to_dense() for _, lost in results)
    assert torch.equal(results[0][0].to_dense() + back, torch.tensor([0.0, 1.0, 2.0, 0.0], dtype=F))
