import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_distlab.payloads import SignPayload, Wire
from lightning_distlab.payloads.signs import columns_of


def some(length, column, offset, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    flags = torch.randint(0, 2, (length,), generator=generator, dtype=torch.uint8)
    means = torch.randn(columns_of(length, column, offset), 2, generator=generator).sort(dim=1).values
    return SignPayload(flags, means, column, offset, dtype)


def restored(payload):
    """Element by element."""
    numbers = (torch.arange(payload.length) + payload.offset) // payload.column
    low, high = payload.means[numbers].to(payload.dtype).unbind(1) if payload.length else (payload.means[:, 0],) * 2
    return torch.where(payload.flags.bool(), high, low).to(payload.dtype)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 120), st.integers(1, 40), st.integers(0, 39), st.integers(1, 5), st.integers(0, 5))
def test_ranges_of_columns_arrive(length, column, offset, parts, seed):
    payload = some(length, column, offset % column, seed=seed)
    torch.testing.assert_close(payload.values, restored(payload), rtol=1e-15, atol=1e-15)
    assert payload.rounded(Wire(dense="fp16")) == (payload, None)
    buffer = payload.encode()
    assert buffer.numel() == payload.wire_size() == payload.max_wire_size() == 8 * len(payload.means) + -(-length // 8)
    arrived = payload.decode(torch.cat([buffer, torch.full((9,), 77, dtype=torch.uint8)]))
    assert torch.equal(arrived.values, payload.values)
    pieces = [piece.decode(piece.encode()) for piece in payload.split_evenly(parts)]
    laid = SignPayload.concat(pieces)
    assert laid.length == length
    assert torch.equal(laid.values, payload.values)
    together = torch.cat([block for _, block in laid.blocks()]) if length else laid.values
    assert torch.equal(together, payload.values)


@pytest.mark.parametrize("terms", [1, 2, 3])
def test_sums_are_dense_and_in_order(terms):
    payloads = [some(50, 7, 3, seed=seed) for seed in range(terms)]
    expected = payloads[0].values
    for payload in payloads[1:]:
        expected = expected + payload.values
    assert torch.equal(SignPayload.merge_all(payloads).values, expected)
    with pytest.raises(AssertionError, match="dense at its destination"):
        payloads[0].merge(payloads[0])
