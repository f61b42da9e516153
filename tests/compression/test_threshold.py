"""Threshold quantisation: the lecture's grid, its definition on several ranks, and what is kept."""

import torch

from lightning_distlab.compression import Threshold
from tests.compression.harness import Ranks, copy_of, random_grads, same_states, snapshot

F = torch.float64
ALL = {"min_numel": 0}


def test_the_grid_of_the_lecture():
    t = 0.5
    grid = torch.tensor(
        [[0.7, 0.1, 0.5, -0.9], [0.2, -0.4, 0.3, 0.6], [0.0, 0.8, -0.1, -2.0], [3.0, -0.51, 0.49, -0.5]]
    )
    expected = torch.tensor([[t, 0, t, -t], [0, 0, 0, t], [0, t, 0, -t], [t, -t, 0, 0]], dtype=F)
    ranks = Ranks(Threshold(threshold=t, **ALL), {"w": torch.zeros(4, 4, dtype=F)}, world=1)
    gradient = grid.double().view(-1)
    average = ranks.step([{"w": gradient.clone()}])["w"]
    assert torch.equal(average.view(4, 4), expected)
    assert torch.equal(ranks.states[0]["w"]["residual"], gradient - expected.view(-1))


def test_the_average_is_its_own_definition():
    tau, weights = 0.8, {"w": torch.zeros(30, 21, dtype=F), "b": torch.zeros(7, dtype=F)}
    ranks = Ranks(Threshold(threshold=tau), weights, world=3)
    residuals = torch.zeros(3, 630, dtype=F)
    given, got = torch.zeros(630, dtype=F), torch.zeros(630, dtype=F)
    for step in range(10):
        grads = random_grads(3, weights, step)
        pending = residuals + torch.stack([g["w"] for g in grads])
        quanta = tau * ((pending >= tau).double() - (pending < -tau).double())
        residuals = pending - quanta
        given += torch.stack([g["w"] for g in grads]).mean(0)
        bias = torch.stack([g["b"] for g in grads]).mean(0)
        average = ranks.step(grads)
        torch.testing.assert_close(average["w"], quanta.mean(0), rtol=1e-14, atol=1e-15)
        torch.testing.assert_close(average["b"], bias, rtol=1e-15, atol=1e-15)
        got += average["w"]
        for rank in range(3):
            torch.testing.assert_close(ranks.states[rank]["w"]["residual"], residuals[rank], rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(got + residuals.mean(0), given, rtol=1e-12, atol=1e-12)


def test_one_quantum_an_element_and_step():
    ranks = Ranks(Threshold(threshold=1.0, **ALL), {"w": torch.zeros(2, 2, dtype=F)}, world=1)
    averages = [ranks.step([{"w": torch.tensor([3.5 if t == 0 else 0.0, 0.4, 0, 0], dtype=F)}])["w"] for t in range(5)]
    assert [a[0].item() for a in averages] == [1, 1, 1, 0, 0]
    assert [round(a[1].item(), 9) for a in averages] == [0, 0, 1, 0, 1]


def test_traffic_falls_with_the_threshold():
    weights = {"w": torch.zeros(100, 100)}
    sizes = []
    for tau in (0.1, 1.0, 10.0, 1000.0):
        ranks = Ranks(Threshold(threshold=tau), weights, world=2)
        for step in range(3):
            ranks.step(random_grads(2, weights, step, dtype=torch.float32))
        sizes.append(ranks.sent[0]["w"].wire_size())
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] <= 32


def test_a_skipped_step_changes_nothing():
    weights = {"w": torch.zeros(20, 20, dtype=F)}
    ranks = Ranks(Threshold(threshold=0.5), weights, world=2)
    ranks.step(random_grads(2, weights, 0))
    before, grads = snapshot(ranks.states), random_grads(2, weights, 1)
    twin = copy_of(grads)
    ranks.abandon(grads)
    assert same_states(ranks.states, before)
    assert all(torch.equal(grads[r]["w"], twin[r]["w"]) for r in range(2))
