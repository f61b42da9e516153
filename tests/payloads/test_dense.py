from itertools import pairwise

import pytest
import torch

from lightning_distlab.payloads import DensePayload, Wire, even_bounds

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
CODECS = ("exact", "fp32", "fp16", "bf16", "int8")


def vector(size, dtype=torch.float32, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def through_wire(payload):
    buffer = payload.encode()
    assert buffer.dtype == torch.uint8
    assert buffer.numel() == payload.wire_size()
    tail = torch.full((5,), 77, dtype=torch.uint8)
    return payload.decode(torch.cat([buffer, tail]))


@pytest.mark.parametrize("size", [0, 1, 37])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_own_precision_travels_unchanged(dtype, size):
    payload = DensePayload(vector(size, dtype))
    assert torch.equal(through_wire(payload).values, payload.values)
    assert payload.max_wire_size() == payload.wire_size()
    assert payload.rounded(Wire()) == (payload, None)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounded_and_error_make_the_payload(dtype, codec):
    payload = DensePayload(vector(501, dtype) * vector(501, dtype, 1) ** 4)
    rounded, error = payload.rounded(Wire(dense=codec))
    total = rounded.values if error is None else rounded.values + error.values
    assert torch.equal(total, payload.values)
    for piece in (rounded, *rounded.split([0, 0, 3, 400, 501])):
        assert torch.equal(through_wire(piece).values, piece.values)


@pytest.mark.parametrize(("dtype", "wide"), zip(DTYPES, (torch.float64, *[torch.float32] * 3), strict=True), ids=str)
def test_sums_are_carried_in_full_precision(dtype, wide):
    first, second = DensePayload(vector(20, dtype)), DensePayload(vector(20, dtype, 1))
    total = first.merge(second)
    assert total.values.dtype == wide
    assert torch.equal(total.values, first.values.to(wide) + second.values.to(wide))
    template = first.as_sum(2)
    assert torch.equal(template.decode(total.encode()).values, total.values)
    assert first.max_wire_size(2) == template.max_wire_size() == total.wire_size() == total.max_wire_size()
    assert torch.equal(first.maximum(second).values, torch.maximum(first.values, second.values).to(wide))


def test_compressed_payloads_are_summed_in_full_precision_too():
    first, second = (DensePayload(vector(20, seed=s)).rounded(Wire(dense="fp16"))[0] for s in (0, 1))
    total = first.merge(second)
    assert (first.wire_size(), total.wire_size(), first.max_wire_size(3)) == (2 + 40, 80, 80)
    assert torch.equal(first.as_sum(2).decode(total.encode()).values, total.values)


@pytest.mark.parametrize("size", [0, 1, 3, 10])
def test_split_and_concat_share_the_storage(size):
    payload = DensePayload(vector(size))
    pieces = payload.split_evenly(4)
    assert [p.length for p in pieces] == [b - a for a, b in pairwise(even_bounds(size, 4))]
    whole = DensePayload.concat(pieces)
    assert torch.equal(whole.values, payload.values)
    if size >= 4:
        assert whole.values.data_ptr() == payload.values.data_ptr()


def test_concat_of_strangers_copies_in_order():
    first, second = DensePayload(vector(3)), DensePayload(vector(2, seed=1))
    shuffled = first.split([0, 1, 3])[::-1]
    assert DensePayload.concat([second, *shuffled]).values.tolist() == [
        *second.values.tolist(),
        *first.values[1:].tolist(),
        first.values[0].item(),
    ]


def test_even_bounds_differ_by_one_at_most():
    for length in range(30):
        for parts in range(1, 12):
            bounds = even_bounds(length, parts)
            sizes = [b - a for a, b in pairwise(bounds)]
            assert (bounds[0], bounds[-1], len(sizes)) == (0, length, parts)
            assert max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True)
