import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_distlab.payloads import QuantaPayload, Wire


def some(size, entries, seed=0, index="auto"):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(size, generator=generator)[:entries].sort().values
    values = torch.randint(0, 2, indices.shape, generator=generator).float() * 2 - 1
    return QuantaPayload(indices, values, size, size, Wire(index=index))


def through_wire(payload):
    buffer = payload.encode()
    assert buffer.numel() == payload.wire_size() <= payload.max_wire_size()
    return payload.decode(torch.cat([buffer, torch.full((9,), 77, dtype=torch.uint8)]))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["int32", "rice", "bitmap", "auto"]), st.integers(0, 200), st.integers(0, 200), st.integers(0, 9)
)
def test_signs_and_their_sums_arrive(index, size, entries, seed):
    entries = min(size, entries)
    payloads = [some(size, max(0, entries - i), seed + i, index) for i in range(4)]
    for payload in payloads:
        assert torch.equal(through_wire(payload).to_dense(), payload.to_dense())
        assert through_wire(payload).indices.tolist() == payload.arrived().indices.tolist()
    total = QuantaPayload.merge_all(payloads)
    assert torch.equal(total.to_dense(), torch.stack([p.to_dense() for p in payloads]).sum(0))
    assert total.wire_size() <= payloads[0].max_wire_size(4)
    buffer = total.encode()
    assert torch.equal(payloads[0].as_sum(4).decode(buffer).to_dense(), total.to_dense())
    laid = QuantaPayload.concat([through_wire(piece) for piece in total.split_evenly(3)])
    assert torch.equal(laid.to_dense(), total.to_dense())
    assert laid.terms == 4


@pytest.mark.parametrize("terms", [2, 3, 127, 200])
def test_sums_of_many(terms):
    payload = some(100, 30)
    total = QuantaPayload.merge_all([payload] * terms)
    assert total.terms == terms
    assert torch.equal(through_wire(total).to_dense(), terms * payload.to_dense())


def test_an_entry_of_a_rank_takes_an_index_and_one_bit():
    size, entries = 1_000_000, 1000
    payload = some(size, entries)
    bits = 8 * payload.wire_size() / entries
    assert 12 < bits < 12.9  # 11.5 of a Rice index, the sign, and the header


def test_a_full_vector_of_signs_travels_whole():
    payload = some(8000, 8000)
    assert payload.wire_size() == 16 + 2000
    assert QuantaPayload.merge_all([payload] * 100).wire_size() == 16 + 8000
