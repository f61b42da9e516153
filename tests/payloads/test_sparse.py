import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_distlab.payloads import SparsePayload, Wire

INDEX = ("int32", "run16", "rice", "bitmap", "auto")
VALUE = ("exact", "fp32", "fp16", "bf16", "int8")


def some(size, entries, wire=None, seed=0, limit=None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(size, generator=generator)[:entries].sort().values
    values = torch.randn(indices.numel(), generator=generator, dtype=dtype)
    return SparsePayload(indices, values, size, entries if limit is None else limit, wire or Wire())


def through_wire(payload):
    buffer = payload.encode()
    assert buffer.dtype == torch.uint8
    assert buffer.numel() == payload.wire_size() <= payload.max_wire_size()
    tail = torch.full((payload.max_wire_size() - buffer.numel(),), 77, dtype=torch.uint8)
    return payload.decode(torch.cat([buffer, tail]))


def same(first, second):
    return torch.equal(first.indices, second.indices) and torch.equal(first.values, second.values)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(INDEX), st.sampled_from(VALUE), st.integers(0, 200), st.integers(0, 200), st.integers(0, 9))
def test_what_arrives_is_what_was_rounded(index, value, size, entries, seed):
    wire = Wire(index=index, value=value)
    original = some(size, min(size, entries), seed=seed)
    payload, error = original.rounded(wire)
    back = payload.values if error is None else payload.values + error.values
    assert torch.equal(back, original.values)
    arrived = through_wire(payload)
    assert torch.equal(arrived.to_dense(), payload.to_dense())
    assert same(arrived, payload.arrived())
    assert arrived.wire_size() == payload.wire_size() == payload.arrived().wire_size()
    for piece in payload.split_evenly(3):
        assert torch.equal(through_wire(piece).to_dense(), piece.to_dense())


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(INDEX), st.sampled_from(VALUE), st.integers(1, 120), st.integers(0, 60), st.integers(1, 6))
def test_capacity_holds_every_sum_within_the_limits(index, value, size, limit, terms):
    wire = Wire(index=index, value=value)
    limit = min(size, limit)
    payloads = [some(size, max(0, limit - i), wire, seed=i, limit=limit).rounded(wire)[0] for i in range(terms)]
    total = SparsePayload.merge_all(payloads)
    if terms > 1:
        assert total.wire_size() <= payloads[0].max_wire_size(terms) == total.max_wire_size()
    assert payloads[0].as_sum(terms).max_wire_size() == payloads[0].max_wire_size(terms)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=2, max_size=6))
def test_sum_over_the_union_of_supports_whichever_way_it_is_added(entries):
    size = 300
    payloads = [some(size, k, seed=i, dtype=torch.float64) for i, k in enumerate(entries)]
    total = SparsePayload.merge_all(payloads)
    dense = torch.zeros(size, dtype=torch.float64)
    for payload in payloads:
        dense += payload.to_dense()
    assert torch.equal(total.to_dense(), dense)
    assert set(total.indices.tolist()) == set().union(*(p.indices.tolist() for p in payloads))
    assert bool((total.indices.diff() > 0).all())
    pairwise = payloads[0]
    for payload in payloads[1:]:
        pairwise = pairwise.merge(payload.arrived())
    assert torch.equal(pairwise.to_dense(), dense)


def test_sorted_and_dense_addition_give_the_same_bits():
    few = [some(1000, 40, seed=i) for i in range(3)]  # 120 entries of 1,000: sorted
    full = [SparsePayload(torch.arange(1000), p.to_dense(), 1000, 1000) for p in few]  # dense
    assert SparsePayload.merge_all(few).to_dense().numpy().tobytes() == (
        SparsePayload.merge_all(full).to_dense().numpy().tobytes()
    )


def test_half_precision_is_summed_in_fp32():
    first, second = (some(50, 9, seed=i, dtype=torch.float16) for i in range(2))
    total = first.merge(second)
    assert total.values.dtype == torch.float32
    assert torch.equal(total.to_dense(), first.to_dense().float() + second.to_dense().float())
    assert same(first.as_sum(2).decode(total.encode()), total)


def test_turns_dense_where_that_is_smaller():
    wire = Wire(index="int32", value="fp32")
    assert some(100, 49, wire).wire_size() == 16 + 200 + 4 * 49  # 49 indices are filled up to 8 bytes
    assert some(100, 51, wire).wire_size() == 16 + 400
    arrived = through_wire(some(100, 51, wire))
    assert arrived.indices.tolist() == list(range(100))


def test_split_and_concat():
    payload = some(97, 20)
    bounds = [0, 0, 30, 31, 97]
    pieces = payload.split(bounds)
    assert [p.size for p in pieces] == [0, 30, 1, 66]
    assert all(p.limit == min(20, p.size) for p in pieces)
    whole = SparsePayload.concat(pieces)
    assert same(whole, payload)
    assert whole.size == 97


def test_explicit_zeros_survive_and_negative_zeros_vanish_in_sums():
    payload = SparsePayload(torch.tensor([3, 5]), torch.tensor([0.0, -0.0]), 40, 2, Wire(index="int32"))
    assert same(through_wire(payload), payload)
    total = payload.merge(payload)
    assert total.indices.tolist() == [3, 5]
    assert not bool(total.values.signbit().any())


def test_no_maximum():
    with pytest.raises(AssertionError, match="SparsePayload has no maximum"):
        some(4, 2).maximum(some(4, 2))
