import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_distlab.payloads import Bundle, DensePayload, Flags, SparsePayload, Wire
from tests.helpers.payloads import as_vector, bits, bundle, dense, sparse


def through_wire(payload):
    buffer = payload.encode()
    assert buffer.numel() == payload.wire_size() <= payload.max_wire_size()
    tail = torch.full((payload.max_wire_size() - buffer.numel(),), 77, dtype=torch.uint8)
    return payload.decode(torch.cat([buffer, tail]))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 80), st.integers(0, 80), st.integers(0, 200), st.data())
def test_round_trip_with_flags_and_presence(size, entries, tensors, data):
    present = data.draw(st.integers(0, (1 << tensors) - 1))
    flags = data.draw(st.sampled_from([Flags.NONE, Flags.NONFINITE, Flags.SIGNAL, Flags.NONFINITE | Flags.SIGNAL]))
    payload = Bundle((sparse(0, size, entries), dense(0, size)), flags, present, tensors)
    arrived = through_wire(payload)
    assert bits(arrived) == bits(payload)
    assert (arrived.flags, arrived.present, arrived.tensors) == (flags, present, tensors)
    assert arrived.wire_size() == payload.wire_size() == payload.arrived().wire_size()


def test_header_is_exactly_counted():
    payload = Bundle((DensePayload(torch.ones(3)),), Flags.NONE, 0, 1)
    assert payload.header_size == 16 + 8 + 8
    assert payload.wire_size() == 32 + 16  # 12 bytes, filled up to 16
    assert Bundle(payload.parts * 5, Flags.NONE, 0, 129).header_size == 16 + 24 + 24


def test_unused_bytes_do_not_leak_memory():
    payload = bundle(0, 9, 3)
    assert torch.equal(payload.encode(), payload.encode())
    odd = Bundle((DensePayload(torch.ones(1)), sparse(0, 50, 1)), Flags.NONE, 0, 1).encode()
    assert odd[36:40].tolist() == [0] * 4


def test_more_parts_than_a_byte_counts():
    payload = Bundle(tuple(DensePayload(torch.tensor([float(i)])) for i in range(400)), Flags.NONE, 0, 400)
    assert as_vector(through_wire(payload)).tolist() == list(range(400))


def test_merge_and_concat_unite_flags_and_presence():
    first = Bundle((dense(0, 4),), Flags.SIGNAL, 0b01, 2)
    second = Bundle((dense(1, 4),), Flags.NONFINITE, 0b10, 2)
    for united in (
        first.merge(second),
        first.maximum(second),
        Bundle.merge_all([first, second]),
        Bundle.concat([first, second]),
    ):
        assert united.flags == Flags.SIGNAL | Flags.NONFINITE
        assert united.present == 0b11
    assert torch.equal(as_vector(first.merge(second)), as_vector(first) + as_vector(second))
    assert (first.flags, first.present) == (Flags.SIGNAL, 0b01)


@pytest.mark.parametrize("parts", [1, 3, 8])
def test_each_part_is_cut_evenly(parts):
    payload = bundle(1, 10, 4)
    chunks = payload.split_evenly(parts)
    for position, part in enumerate(payload.parts):
        assert [c.parts[position].length for c in chunks] == [p.length for p in part.split_evenly(parts)]
    assert all((c.flags, c.present) == (payload.flags, payload.present) for c in chunks)
    assert bits(Bundle.concat(chunks)) == bits(payload)


def test_capacity_of_sums():
    wire = Wire(index="int32", value="fp16", dense="fp16")

    def contribution(seed):
        few = SparsePayload(torch.tensor([seed, 20 + seed]), torch.ones(2), 90, 2, wire)
        return Bundle((few.rounded(wire)[0], DensePayload(torch.ones(7)).rounded(wire)[0]), Flags.NONE, 0, 2)

    total = Bundle.merge_all([contribution(seed) for seed in range(4)])
    assert total.wire_size() == contribution(0).max_wire_size(4) == total.max_wire_size()
    assert bits(contribution(0).as_sum(4).decode(total.encode())) == bits(total)


@pytest.mark.parametrize(
    "template",
    [
        Bundle((dense(0, 3), dense(0, 3)), Flags.NONE, 0, 1),
        Bundle((dense(0, 3),), Flags.NONE, 0, 100),
    ],
)
def test_a_foreign_message_is_refused(template):
    message = Bundle((dense(0, 3),), Flags.NONE, 0, 1).encode()
    with pytest.raises(RuntimeError, match="do not run the same model and strategy"):
        template.decode(torch.cat([message, torch.zeros(100, dtype=torch.uint8)]))


def test_a_cut_message_is_refused():
    payload = Bundle((dense(0, 30),), Flags.NONE, 0, 1)
    with pytest.raises(RuntimeError, match="in at most 100 bytes"):
        payload.decode(payload.encode()[:100])


def test_what_a_bundle_cannot_do():
    with pytest.raises(AssertionError, match="split_evenly"):
        bundle(0, 4, 1).split([0, 4])
    with pytest.raises(AssertionError, match="before they are bundled"):
        bundle(0, 4, 1).rounded(Wire())
