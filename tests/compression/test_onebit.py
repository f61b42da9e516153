"""1-bit SGD: a case by hand, its definition on several ranks, and what both owners of errors keep."""

from itertools import pairwise

import pytest
import torch

from lightning_distlab.compression import OneBit, Param
from lightning_distlab.payloads import even_bounds
from tests.compression.harness import Ranks, copy_of, random_grads, same_states, snapshot

F = torch.float64


def two_means(values, numbers):
    """Q: each element becomes the mean of those of its sign in its column; `numbers` says which column."""
    out = torch.zeros_like(values)
    for column in numbers.unique():
        for side in (values >= 0, values < 0):
            chosen = (numbers == column) & side
            if chosen.any():
                out[chosen] = values[chosen].mean().float().double()
    return out


def test_a_case_by_hand():
    """The columns of a matrix [in, out]; PyTorch keeps its transpose."""
    by_hand = torch.tensor([[1.0, -2, 4, 0], [3, -4, -4, 2], [-1, 6, 8, 4], [-3, 2, -2, -6]], dtype=F)
    expected = torch.tensor([[2.0, -3, 6, 2], [2, -3, -3, 2], [-2, 4, 6, 2], [-2, 4, -3, -6]], dtype=F)
    ranks = Ranks(OneBit(min_numel=0), {"w": torch.zeros(4, 4, dtype=F)}, world=1)
    average = ranks.step([{"w": by_hand.t().reshape(-1)}])["w"]
    assert torch.equal(average.view(4, 4).t(), expected)
    assert torch.equal(ranks.states[0]["w"]["error"].view(4, 4).t(), by_hand - expected)
    assert torch.equal(ranks.states[0]["w"]["owner"], torch.zeros(16, dtype=F))  # two values a column already
    assert ranks.messages[0][0].wire_size() == 16 // 8 + 4 * 8


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(20, 13), (6, 3, 5, 3), (2, 300), (301, 1)])
def test_the_average_is_its_own_definition(world, shape):
    weights = {"w": torch.zeros(shape, dtype=F), "b": torch.zeros(3, dtype=F)}
    ranks = Ranks(OneBit(min_numel=0), weights, world)
    n = weights["w"].numel()
    numbers, bounds = torch.arange(n) // (n // shape[0]), even_bounds(n, world)
    errors, owner = torch.zeros(world, n, dtype=F), torch.zeros(n, dtype=F)
    given, got = torch.zeros(n, dtype=F), torch.zeros(n, dtype=F)
    for step in range(4):
        grads = random_grads(world, weights, step)
        pending = errors + torch.stack([g["w"] for g in grads])
        given += torch.stack([g["w"] for g in grads]).mean(0)
        sent = torch.stack([two_means(p, numbers) for p in pending])
        errors, sums = pending - sent, owner + sent.sum(0)
        parts = [two_means(sums[a:b], numbers[a:b]) for a, b in pairwise(bounds)]
        owner = sums - torch.cat(parts)
        average = ranks.step(grads)
        torch.testing.assert_close(average["w"], torch.cat(parts) / world, rtol=1e-6, atol=1e-6)
        got += average["w"]
        held = torch.stack([s["w"]["error"] for s in ranks.states]).sum(0)
        kept = torch.stack([s["w"]["owner"] for s in ranks.states]).sum(0)
        torch.testing.assert_close(got + (held + kept) / world, given, rtol=1e-12, atol=1e-12)
        # the two may round a mean to different fp32 numbers; go on from the same
        errors = torch.stack([s["w"]["error"] for s in ranks.states])
        owner = kept
        for rank in range(world):
            outside = ranks.states[rank]["w"]["owner"].clone()
            outside[bounds[rank] : bounds[rank + 1]] = 0
            assert not outside.any()


def test_errors_of_other_ranges_are_taken_over():
    """After a resume from the mean, or at another number of ranks: sum of errors / ranks is conserved."""
    weights = {"w": torch.zeros(20, 30, dtype=F)}
    ranks = Ranks(OneBit(), weights, world=3)
    everything = []
    for state in ranks.states:
        for key in ("error", "owner"):
            state["w"][key].normal_(generator=torch.Generator().manual_seed(len(everything)))
            everything.append(state["w"][key].clone())
    before = torch.stack(everything).sum(0) / 3
    average = ranks.step([{"w": torch.zeros(600, dtype=F)} for _ in range(3)])["w"]
    after = sum(state["w"][key] for state in ranks.states for key in ("error", "owner")) / 3
    torch.testing.assert_close(average + after, before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_is_lost_in_lower_precision(dtype):
    weights = {"w": torch.zeros(16, 24, dtype=dtype)}
    ranks = Ranks(OneBit(), weights, world=2)
    given, got = torch.zeros(384, dtype=F), torch.zeros(384, dtype=F)
    for step in range(10):
        grads = random_grads(2, weights, step, dtype=dtype)
        given += torch.stack([g["w"] for g in grads]).double().mean(0)
        got += ranks.step(grads)["w"].double()
    held = sum(s["w"][key].double() for s in ranks.states for key in ("error", "owner")) / 2
    assert (got + held - given).norm() <= (1e-5 if dtype == torch.float32 else 2e-2) * given.norm()


def test_one_sided_and_empty_columns():
    ranks = Ranks(OneBit(min_numel=0), {"w": torch.zeros(3, 4, dtype=F)}, world=2)
    rows = torch.tensor([[1.0, 2, 3, 6], [-1, -1, -1, -1], [0, 0, 0, 0]], dtype=F).view(-1)
    average = ranks.step([{"w": rows.clone()} for _ in range(2)])["w"]
    torch.testing.assert_close(average, torch.tensor([3.0] * 4 + [-1.0] * 4 + [0.0] * 4, dtype=F))


def test_embeddings_are_left_alone():
    compressor = OneBit()
    assert compressor.exclusion.reason(Param("embed.weight", torch.zeros(50, 50)))
    assert compressor.exclusion.reason(Param("head.weight", torch.zeros(50, 50))) is None


def test_a_skipped_step_changes_nothing():
    weights = {"w": torch.zeros(20, 30, dtype=F), "b": torch.zeros(4, dtype=F)}
    ranks = Ranks(OneBit(), weights, world=2)
    ranks.step(random_grads(2, weights, 0))
    before, grads = snapshot(ranks.states), random_grads(2, weights, 1)
    twin = copy_of(grads)
    ranks.abandon(grads)
    assert same_states(ranks.states, before)
    assert all(torch.equal(grads[r][n], twin[r][n]) for r in range(2) for n in weights)
