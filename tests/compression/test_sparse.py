"""Gradient dropping: exact cuts by magnitude, and nothing lost."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_distlab.compression import Hyper, Param, Sparse
from lightning_distlab.payloads import DensePayload, Wire
from tests.compression.harness import Ranks, copy_of, dense, random_grads, same_states, snapshot

SHAPES = {"a": (30, 20), "b": (5, 7, 3), "c": (50, 11), "a.bias": (30,)}
COMPRESSED = 600 + 105 + 550


def make_weights(dtype=torch.float64):
    return {n: torch.zeros(shape, dtype=dtype) for n, shape in SHAPES.items()}


@settings(max_examples=40, deadline=None)
@given(
    density=st.sampled_from([0.0001, 0.01, 0.2, 0.9]),
    coarse=st.booleans(),
    share_of_zeros=st.sampled_from([0.0, 0.5, 0.995, 1.0]),
    seed=st.integers(0, 1 << 16),
)
def test_global_scope_sends_exactly_the_k_largest_of_all_tensors(density, coarse, share_of_zeros, seed):
    weights = make_weights()
    ranks = Ranks(Sparse(density=density, min_numel=0), weights, 2)
    k = max(1, round(density * COMPRESSED))
    generator = torch.Generator().manual_seed(seed)
    for t in range(2):
        grads = random_grads(2, weights, seed + t)
        for named in grads:
            for g in named.values():
                if coarse:  # many ties
                    g.round_().clamp_(-2, 2)
                g[torch.rand(g.shape, generator=generator) < share_of_zeros] = 0.0
        ranks.step(grads)
        for rank in range(2):
            payloads = [ranks.sent[rank][n] for n in ("a", "b", "c")]
            assert sum(p.indices.numel() for p in payloads) == k
            assert all(p.limit == min(p.size, k) for p in payloads)
            smallest_sent = min(float(p.values.abs().min()) for p in payloads if p.values.numel())
            largest_kept = max(float(ranks.states[rank][n]["residual"].abs().max()) for n in ("a", "b", "c"))
            assert smallest_sent >= largest_kept


def test_ranks_may_send_different_numbers_of_entries_of_a_tensor():
    weights = make_weights()
    ranks = Ranks(Sparse(density=0.02, min_numel=0), weights, 2)
    grads = random_grads(2, weights, 0)
    grads[1]["b"].mul_(100)
    ranks.step(grads)
    assert ranks.sent[0]["b"].indices.numel() < ranks.sent[1]["b"].indices.numel()
    assert ranks.sent[0]["b"].limit == ranks.sent[1]["b"].limit == 25


def test_a_tensor_without_a_gradient_on_this_rank_still_competes_with_its_residual():
    weights = {n: torch.zeros(20, 20, dtype=torch.float64) for n in "ab"}
    ranks = Ranks(Sparse(density=0.01), weights, 2)
    ranks.states[0]["a"]["residual"][7] = 1e6
    step_grads = random_grads(2, weights, 0)
    observed, k = ranks.compressor.observe(
        {"b": step_grads[0]["b"]}, ranks.states[0], type("S", (), {"scratch": ranks.scratch})
    )
    assert k == 8
    assert observed == {"a": 1, "b": 7}


def test_tensor_scope_cuts_each_tensor_by_itself():
    weights = make_weights()
    compressor = Sparse(density=0.1, scope="tensor", min_numel=0)
    assert not compressor.needs_whole_gradient
    ranks = Ranks(compressor, weights, 2)
    grads = random_grads(2, weights, 0)
    local = copy_of(grads)
    ranks.step(grads)
    for n, k in {"a": 60, "b": 10, "c": 55}.items():  # 10.5 rounds to even
        best = torch.topk(local[1][n].abs(), k).indices.sort().values
        assert torch.equal(ranks.sent[1][n].indices, best)
        assert ranks.sent[1][n].limit == k


@settings(max_examples=40, deadline=None)
@given(
    scope=st.sampled_from(["global", "tensor"]),
    density=st.sampled_from([0.001, 0.1, 1.0]),
    wire=st.sampled_from(["fp32", "fp16", "bf16", "int8"]),
    magnitude=st.sampled_from([1e-30, 1.0, 1e6]),
    seed=st.integers(0, 1 << 16),
)
def test_input_is_sent_plus_residual_bit_for_bit(scope, density, wire, magnitude, seed):
    weights = {"a": torch.zeros(37, 29), "b": torch.zeros(211, 3)}
    ranks = Ranks(Sparse(density=density, scope=scope), weights, 2, wire=Wire(value=wire, dense=wire))
    for t in range(3):
        grads = random_grads(2, weights, seed + t, dtype=torch.float32)
        for named in grads:
            for g in named.values():
                g.mul_(magnitude)
        before, local = snapshot(ranks.states), copy_of(grads)
        ranks.step(grads)
        for rank in range(2):
            for n in weights:
                total = dense(ranks.sent[rank][n]) + ranks.states[rank][n]["residual"]
                assert torch.equal(total, before[rank][n]["residual"] + local[rank][n])


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_nothing_is_lost_over_many_steps(world, scope):
    """Σ averages + mean residual = Σ mean gradients; small integers make it exact in floating point."""
    weights = {n: w for n, w in make_weights().items() if w.dim() > 1}
    ranks = Ranks(Sparse(density=0.01, scope=scope), weights, world)
    generator = torch.Generator().manual_seed(3)
    arrived, given_in = ({n: torch.zeros(w.numel()).double() for n, w in weights.items()} for _ in range(2))
    for _ in range(30):
        grads = [
            {n: torch.randint(-9, 10, (w.numel(),), generator=generator).double() for n, w in weights.items()}
            for _ in range(world)
        ]
        for n in weights:
            given_in[n] += sum(g[n] for g in grads) / world
        for n, average in ranks.step(grads).items():
            arrived[n] += average
    for n, w in weights.items():
        if "residual" in ranks.states[0][n]:
            kept = sum(state[n]["residual"] for state in ranks.states) / world
            assert kept.count_nonzero() > 0.8 * w.numel()
            arrived[n] += kept
        assert torch.equal(arrived[n], given_in[n])


def test_an_entry_that_was_withheld_arrives_without_momentum():
    """Ten gradients of 1, withheld, arrive as 10; with velocities they would have moved the weight by 41.38106."""
    ranks = Ranks(
        Sparse(density=0.5, scope="tensor", exclude_vectors=False, min_numel=0),
        {"w": torch.zeros(2, dtype=torch.float64)},
        hyper=Hyper(momentum=0.9),
    )
    for t in range(10):
        rival = 100.0 if t < 9 else 0.0
        average = ranks.step([{"w": torch.tensor([1.0, rival], dtype=torch.float64)} for _ in range(2)])["w"]
    assert average.tolist() == [10.0, 0.0]
    assert not ranks.compressor.owns_momentum


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_density_one_is_the_plain_average(scope):
    weights = make_weights()
    compressor = Sparse(density=1.0, scope=scope)
    assert not compressor.needs_whole_gradient
    assert compressor.rounds[0].payload is DensePayload
    ranks = Ranks(compressor, weights, 2)
    for t in range(3):
        grads = random_grads(2, weights, t)
        expected = {n: (grads[0][n] + grads[1][n]) / 2 for n in weights}
        averages = ranks.step(grads)
        assert all(torch.equal(averages[n], expected[n]) for n in weights)


def test_an_abandoned_step_leaves_no_trace():
    weights = make_weights()
    ranks = Ranks(Sparse(density=0.02), weights, 2, wire=Wire(value="fp16", dense="fp16"))
    for t in range(3):
        grads = random_grads(2, weights, t)
        ranks.step(grads)
        before = snapshot(ranks.states)
        again = random_grads(2, weights, 10 + t)
        local = copy_of(again)
        ranks.abandon(again)
        assert same_states(ranks.states, before)
        assert all(torch.equal(again[r][n], local[r][n]) for r in range(2) for n in weights)


def test_memory_is_one_tensor_per_compressed_parameter():
    compressor = Sparse(min_numel=100)
    assert set(compressor.init_state(Param("w", torch.zeros(10, 10)))) == {"residual"}
    assert compressor.init_state(Param("w", torch.zeros(10, 9))) == {}
    assert compressor.init_state(Param("w", torch.zeros(1000))) == {}
    assert set(Sparse(exclude_vectors=False).init_state(Param("w", torch.zeros(1000)))) == {"residual"}


def test_half_precision_gradients_accumulate_in_single_precision():
    weights = {"w": torch.zeros(20, 20, dtype=torch.bfloat16)}
    ranks = Ranks(Sparse(density=0.01), weights, 2, wire=Wire())
    grads = [{"w": torch.full((400,), 1.0, dtype=torch.bfloat16)} for _ in range(2)]
    for _ in range(3):
        for named in grads:
            named["w"].fill_(1.0 / 256)
        average = ranks.step(grads)["w"]
        assert average.dtype == torch.bfloat16
    residual = ranks.states[0]["w"]["residual"]
    assert residual.dtype == torch.float32
    assert residual.max() == 3.0 / 256


def test_description_states_scope_and_rule():
    params = {n: Param(n, w) for n, w in make_weights().items()}
    text = Sparse().describe(params)
    for part in ("density 0.01", "global threshold", "2 of 4 tensors", "dim <= 1", "numel < 256"):
        assert part in text
