import pytest
import torch

from lightning_distlab.payloads import LevelPayload, Wire
from lightning_distlab.payloads.codecs.levels import LEVEL_CODES, level_dtype


def some(count, bound, code="bits", seed=0):
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(-bound, bound + 1, (count,), generator=generator).to(level_dtype(bound))
    return LevelPayload(levels, bound, code)


def through_wire(payload):
    buffer = payload.encode()
    assert buffer.dtype == torch.uint8
    assert buffer.numel() == payload.wire_size() == payload.max_wire_size()
    return payload.decode(torch.cat([buffer, torch.full((5,), 77, dtype=torch.uint8)]))


@pytest.mark.parametrize("count", [0, 1, 4, 5, 37, 1000])
@pytest.mark.parametrize("code", LEVEL_CODES)
@pytest.mark.parametrize("bound", [1, 2, 3, 7, 8, 127, 128, 254, 16_383, 16_384, 100_000])
def test_levels_arrive(bound, code, count):
    payload = some(count, bound, code)
    assert payload.rounded(Wire(dense="int8")) == (payload, None)
    arrived = through_wire(payload)
    assert arrived.levels.dtype == payload.levels.dtype
    assert torch.equal(arrived.levels, payload.levels)
    pieces = payload.split_evenly(3)
    assert torch.equal(LevelPayload.concat([through_wire(piece) for piece in pieces]).levels, payload.levels)


@pytest.mark.parametrize(("bound", "bits"), [(1, 2), (2, 3), (3, 3), (7, 4), (127, 8), (254, 9)])
def test_a_level_takes_the_bits_of_its_range(bound, bits):
    assert some(8000, bound).wire_size() == 1000 * bits


def test_base_three_takes_a_fifth_of_a_byte():
    assert some(1000, 1, "base3").wire_size() == 200
    assert some(1001, 1, "base3").wire_size() == 201


@pytest.mark.parametrize("bound", [1, 100, 127, 16_000])
def test_sums_are_exact_and_decoded_by_the_template(bound):
    payloads = [some(50, bound, "base3", seed) for seed in range(5)]
    total = LevelPayload.merge_all(payloads)
    assert total.bound == 5 * bound
    assert torch.equal(total.levels.long(), torch.stack([p.levels.long() for p in payloads]).sum(0))
    template = payloads[0].as_sum(5)
    assert torch.equal(template.decode(total.encode()).levels, total.levels)
    assert payloads[0].max_wire_size(5) == template.max_wire_size() == total.wire_size()
