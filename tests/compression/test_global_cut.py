"""The cut over many tensors against a sort of everything."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_distlab.compression.base import Scratch
from lightning_distlab.compression.global_cut import counts_of_global_top_k


def brute_force(pieces, k):
    """Counts per tensor, ties to the first tensors: a stable sort of all magnitudes."""
    names = [n for n, (residual, _) in pieces.items() for _ in range(residual.numel())]
    values = torch.cat([(r if g is None else r + g).abs().double() for r, g in pieces.values()])
    order = torch.sort(values, descending=True, stable=True).indices[:k].tolist()
    chosen = [names[i] for i in order]
    return {n: chosen.count(n) for n in pieces}


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=5).filter(any),
    share=st.floats(0, 1),
    levels=st.sampled_from([0, 1, 3, 1000]),
    sample_size=st.sampled_from([1, 8, 100, 1 << 18]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 1 << 16),
)
def test_counts_equal_those_of_a_sort(sizes, share, levels, sample_size, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    pieces = {}
    for i, size in enumerate(sizes):
        residual = (torch.randn(size, generator=generator, dtype=dtype) * levels).round() / 7
        grad = None if i % 3 == 2 else (torch.randn(size, generator=generator, dtype=dtype) * levels).round() / 7
        pieces[f"t{i}"] = (residual, grad)
    k = max(1, round(share * sum(sizes)))
    assert counts_of_global_top_k(pieces, k, Scratch(), sample_size) == brute_force(pieces, k)


def test_a_sample_that_misleads_costs_time_only():
    values = torch.arange(1.0, 10_001.0)
    values[::11] *= -1e4  # a sample of every 11th sees these only, and proposes far too high a bound
    pieces = {"a": (values, None), "b": (torch.ones(100), torch.zeros(100))}
    for k in (1, 100, 300, 900, 5000, 10_100):
        assert counts_of_global_top_k(pieces, k, Scratch(), 1000) == brute_force(pieces, k)


def test_a_sample_that_sees_zeros_only_costs_time_only():
    values = torch.zeros(10_000)
    values[1:10:2] = torch.arange(5.0)
    pieces = {"a": (values, None), "b": (torch.ones(100), torch.zeros(100))}
    for k in (1, 4, 50, 104, 105, 10_100):
        assert counts_of_global_top_k(pieces, k, Scratch(), 3) == brute_force(pieces, k)


def test_tensors_of_different_precision_are_cut_together():
    generator = torch.Generator().manual_seed(0)
    pieces = {
        "single": (torch.randn(500, generator=generator), torch.randn(500, generator=generator)),
        "double": (torch.randn(700, generator=generator, dtype=torch.float64), None),
    }
    for k in (1, 12, 600, 1199, 1200):
        assert counts_of_global_top_k(pieces, k, Scratch()) == brute_force(pieces, k)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_ends_in_a_cut_all_the_same(bad):
    grad = torch.randn(1000)
    grad[::7] = bad
    for k in (1, 50, 900, 1100):
        counts = counts_of_global_top_k({"a": (torch.zeros(1000), grad), "b": (torch.ones(100), None)}, k, Scratch())
        assert sum(counts.values()) == k
        assert counts["a"] <= 1000
        assert counts["b"] <= 100
