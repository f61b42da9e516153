import math
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_distlab.compression import selection
from lightning_distlab.compression.selection import SCRATCH_BYTES, above, threshold_for, top_k

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def expected(x, k):
    """The definition: sort by magnitude, equal ones by index, take k."""
    order = torch.sort(x.flatten().abs(), descending=True, stable=True).indices
    return order[:k].sort().values


def heavy_tailed(numel, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator).pow(-0.5)).to(dtype)


@dtypes
@pytest.mark.parametrize("numel", [1, 2, 1000, 20_000, 600_000])
def test_equals_the_definition(dtype, numel):
    x = heavy_tailed(numel, dtype)
    for k in {0, 1, numel // 1000, numel // 100, numel // 3, numel - 1, numel, numel + 5}:
        found = top_k(x, k)
        assert found.dtype == torch.int64
        assert torch.equal(found, expected(x, k))


@dtypes
def test_magnitudes_are_those_of_torch_topk(dtype):
    x = heavy_tailed(300_000, dtype, seed=1)
    ours = x[top_k(x, 300)].abs().sort(descending=True).values
    assert torch.equal(ours, torch.topk(x.abs(), 300).values)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_ties_go_to_the_lowest_index(data):
    levels = data.draw(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, math.inf, 1e-40]), max_size=60))
    x = torch.tensor(levels)
    k = data.draw(st.integers(0, len(levels)))
    assert torch.equal(top_k(x, k), expected(x, k))


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(700_000),
        torch.full((700_000,), -3.0),
        torch.arange(700_000.0),
        torch.arange(700_000.0).flip(0),
        (torch.randn(700_000) * 4).round(),
        torch.randn(700_000) * (torch.rand(700_000) < 0.0005),
        torch.cat([torch.zeros(699_000), torch.randn(1000)]),
        torch.where(torch.arange(700_000) % 171 == 0, 1.0, 1e-3) * torch.randn(700_000),
    ],
    ids=["zeros", "constant", "ascending", "descending", "ties", "mostly zero", "all at the end", "periodic"],
)
@pytest.mark.parametrize("k", [7, 700, 250_000])
def test_adverse_layouts(x, k):
    assert torch.equal(top_k(x, k), expected(x, k))
    assert threshold_for(x, k) == float(x[expected(x, k)].abs().min())


def test_wrong_proposals_cost_time_and_not_correctness(monkeypatch):
    x = heavy_tailed(600_000)
    bits = int(torch.tensor(1e30).view(torch.int32))
    for proposals in ([0], [1], [bits, 0], [bits, bits - 1, 0]):
        monkeypatch.setattr(selection, "_proposals", lambda *_, proposals=proposals: iter(proposals))
        assert torch.equal(top_k(x, 600), expected(x, 600))


def test_the_sample_proposes_well():
    """One pass is enough nearly always, and keeps little more than k."""
    x = heavy_tailed(2_000_000, seed=3)
    for k, slack in ((2000, 5), (20_000, 2)):  # the sample holds 10 and 100 of the top k
        for seed in range(20):
            reader = selection._BlockReader([x], None)
            bound = next(selection._proposals(reader, k, seed))
            survivors = sum(reader.reaching(block, bound).size for _, block in reader.blocks())
            assert k <= survivors <= slack * k
            assert torch.equal(top_k(x, k, seed=seed), top_k(x, k))


def test_the_tail_of_a_tensor_is_not_starved():
    x = torch.randn(2_000_000, generator=torch.Generator().manual_seed(5))
    counts = torch.histc(top_k(x, 20_000).double(), bins=20, min=0, max=2_000_000)
    assert counts.sum() == 20_000
    assert (counts - 1000).abs().max() < 5 * 1000**0.5


def test_shape_and_strides_do_not_matter():
    x = heavy_tailed(60_000).view(100, 600)
    assert torch.equal(top_k(x, 60), expected(x, 60))
    assert torch.equal(top_k(x.t(), 60), expected(x.t(), 60))
    assert torch.equal(top_k(x[:, ::7], 60), expected(x[:, ::7], 60))
    assert torch.equal(top_k(x.clone().requires_grad_(), 60), expected(x, 60))
    assert top_k(torch.empty(0, 3), 5).numel() == 0


def test_the_input_is_not_changed():
    x = heavy_tailed(300_000)
    before = x.clone()
    top_k(x, 300), threshold_for(x, 300), above(x, 1.0)
    assert torch.equal(x, before)


@dtypes
def test_scratch_is_used_and_changes_nothing(dtype):
    x, scratch = heavy_tailed(300_000, dtype), torch.zeros(SCRATCH_BYTES, dtype=torch.uint8)
    for view in (scratch, scratch.view(torch.int32)):
        assert torch.equal(top_k(x, 300, scratch=view), top_k(x, 300))
    assert scratch.any()
    assert threshold_for(x, 300, scratch=scratch) == threshold_for(x, 300)
    assert torch.equal(above(x, 2.0, scratch=scratch), above(x, 2.0))


def test_working_memory_does_not_grow_with_the_tensor():
    """Even where every entry reaches every threshold."""
    peaks = []
    for numel in (4_000_000, 16_000_000):
        x = torch.ones(numel)
        tracemalloc.start()
        top_k(x, 1000)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # The sample, 0.5 % of the tensor at most, is all that grows.
    assert 1_000_000 < peaks[1] < 1.1 * peaks[0]


@dtypes
def test_threshold_and_above_agree_with_top_k(dtype):
    x = heavy_tailed(200_000, dtype, seed=7)
    for k in (1, 200, 100_000, 200_000):
        threshold = threshold_for(x, k)
        assert threshold == float(torch.topk(x.abs().double(), k).values[-1])
        found = above(x, threshold)
        assert torch.equal(found, (x.double().abs() >= threshold).nonzero().view(-1))
        assert found.numel() >= k


@dtypes
def test_above_compares_exactly_with_thresholds_that_the_dtype_lacks(dtype):
    x = torch.tensor([0.0, 0.1, 0.2, 0.3, -0.2, 1e-3, 6e4, -6e4]).to(dtype)
    for threshold in (0.0, 1e-300, 0.1, 0.2, 0.30000000000001, 0.29999999999999, 5.99e4, 1e300, math.inf):
        assert torch.equal(above(x, threshold), (x.double().abs() >= threshold).nonzero().view(-1))


def test_one_threshold_for_several_tensors():
    parts = [heavy_tailed(n, seed=n) * s for n, s in ((50_000, 1.0), (3, 10.0), (0, 1.0), (400_000, 0.1))]
    everything = torch.cat(parts)
    for k in (1, 450, 45_000, everything.numel()):
        threshold = threshold_for(parts, k)
        assert threshold == threshold_for(everything, k)
        assert sum(above(part, threshold).numel() for part in parts) >= k


@dtypes
def test_path_of_other_devices(dtype):
    x = heavy_tailed(50_000, dtype)
    for data in (x, torch.ones_like(x), (x * 2).round()):
        for k in (1, 50, 20_000):
            assert torch.equal(selection._top_k_by_sort(data, k), expected(data, k))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_selects_the_same():
    x = heavy_tailed(100_000)
    threshold = threshold_for(x, 100)
    assert torch.equal(top_k(x.cuda(), 100).cpu(), top_k(x, 100))
    assert threshold_for(x.cuda(), 100) == threshold
    assert torch.equal(above(x.cuda(), threshold).cpu(), above(x, threshold))


def test_what_cannot_be_selected_is_refused():
    x = torch.randn(10)
    with pytest.raises(ValueError, match="k=-1"):
        top_k(x, -1)
    with pytest.raises(ValueError, match="complex64"):
        top_k(x.to(torch.complex64), 1)
    for k in (0, 11):
        with pytest.raises(ValueError, match=r"\[1, 10\]"):
            threshold_for(x, k)
    for threshold in (-1.0, math.nan):
        with pytest.raises(ValueError, match="0 or more"):
            above(x, threshold)
    with pytest.raises(ValueError, match="SCRATCH_BYTES"):
        top_k(x, 3, scratch=torch.empty(10))


@pytest.mark.parametrize("bits", [torch.int16, torch.int32, torch.int64])
def test_kth_largest_by_digits(bits):
    generator = torch.Generator().manual_seed(11)
    top = torch.iinfo(bits).max
    wide = torch.randint(0, top, (5000,), generator=generator).to(bits)
    for values in (wide, wide % 7, wide.sort(descending=True).values, torch.full_like(wide, top), wide[:1]):
        ordered = values.sort(descending=True).values
        for k in {1, 2, values.numel() // 2, values.numel()}:
            assert k > values.numel() or selection._kth_largest(values.numpy(), k) == int(ordered[k - 1])
