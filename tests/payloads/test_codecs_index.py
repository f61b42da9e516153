import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_distlab.payloads.codecs import INDEX_CODECS, IndexCodec
from lightning_distlab.payloads.codecs.bits import pack, pack_flags, packed_size, unpack, unpack_flags
from lightning_distlab.payloads.codecs.index import RiceCodec

codecs = pytest.mark.parametrize("codec", INDEX_CODECS.values(), ids=INDEX_CODECS)


def random_indices(length, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(length, generator=generator)[:count].sort().values


def check_round_trip(codec: IndexCodec, indices: torch.Tensor, length: int) -> torch.Tensor:
    buffer = codec.encode(indices, length)
    assert buffer.dtype == torch.uint8
    assert buffer.dim() == 1
    assert buffer.numel() == codec.size(indices, length) <= codec.max_size(indices.numel(), length)
    decoded = codec.decode(buffer, indices.numel(), length)
    assert decoded.dtype == torch.int64
    assert torch.equal(decoded, indices)
    unaligned = torch.cat([torch.zeros(1, dtype=torch.uint8), buffer])[1:]
    assert torch.equal(codec.decode(unaligned, indices.numel(), length), indices)
    return buffer


@codecs
@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 9, 1000, 65_537])
def test_none_one_and_all(codec, length):
    check_round_trip(codec, torch.arange(0), length)
    check_round_trip(codec, torch.arange(length), length)
    for index in {0, length // 2, length - 1} if length else ():
        check_round_trip(codec, torch.tensor([index]), length)


@codecs
@pytest.mark.parametrize("density", [0.001, 0.01, 0.0625, 0.25, 0.9])
def test_random(codec, density):
    length = 100_003
    check_round_trip(codec, random_indices(length, int(density * length)), length)


@codecs
def test_clustered(codec):
    rows = torch.tensor([3, 4, 500, 999])[:, None] * 1000 + torch.arange(1000)
    check_round_trip(codec, rows.flatten(), 1_000_000)


@codecs
def test_gaps_beyond_16_bits(codec):
    gaps = torch.tensor([65_533, 65_534, 65_535, 65_536, 65_537, 131_070, 131_071, 200_000, 1, 1])
    indices = gaps.cumsum(0) - 1
    check_round_trip(codec, indices, int(indices[-1]) + 1)
    check_round_trip(codec, indices + 1, int(indices[-1]) + 500_000)


@codecs
@given(data=st.data(), length=st.integers(1, 5000))
@settings(max_examples=60, deadline=None)
def test_any_set(codec, data, length):
    chosen = data.draw(st.sets(st.integers(0, length - 1)))
    check_round_trip(codec, torch.tensor(sorted(chosen), dtype=torch.int64), length)


@given(data=st.data(), exponent=st.integers(20, 45))
@settings(max_examples=60, deadline=None)
def test_rice_and_auto_take_long_vectors(data, exponent):
    length = 1 << exponent
    chosen = data.draw(st.sets(st.integers(0, length - 1), max_size=50))
    indices = torch.tensor(sorted(chosen), dtype=torch.int64)
    check_round_trip(INDEX_CODECS["rice"], indices, length)
    if exponent >= 40:  # a bitmap is then never the smallest
        assert indices.numel() == 0 or INDEX_CODECS["auto"].encode(indices, length)[0] in (0, 2)
    check_round_trip(INDEX_CODECS["auto"], indices, length)


def test_int32_reaches_two_to_the_32_and_says_no_beyond():
    codec, indices = INDEX_CODECS["int32"], torch.tensor([0, (1 << 31) - 1, 1 << 31, (1 << 32) - 1])
    check_round_trip(codec, indices, 1 << 32)
    for call in (
        lambda length: codec.encode(indices, length),
        lambda length: codec.size(indices, length),
        lambda length: codec.max_size(4, length),
        lambda length: codec.decode(torch.zeros(16, dtype=torch.uint8), 4, length),
    ):
        with pytest.raises(ValueError, match="use rice"):
            call((1 << 32) + 1)


@codecs
def test_max_size_bounds_every_set_of_at_most_count(codec):
    for length in range(1, 12):
        largest = 0
        by_count = [0] * (length + 1)
        for bits in range(1 << length):
            indices = torch.tensor([i for i in range(length) if bits >> i & 1], dtype=torch.int64)
            by_count[indices.numel()] = max(by_count[indices.numel()], codec.size(indices, length))
        for count in range(length + 1):
            largest = max(largest, by_count[count])
            assert codec.max_size(count, length) >= largest


@pytest.mark.parametrize("length", [100, 4096, 10_007, 100_000])
def test_rice_bound_holds_for_the_worst_set_of_every_smaller_count(length):
    """All gaps in one place make the quotients largest."""
    rice, worst = INDEX_CODECS["rice"], 0
    for count in sorted({*range(1, 100), *(int(length * i / 400) for i in range(1, 401))}):
        worst = max(worst, rice.size(torch.arange(length - count, length), length))
        assert worst <= rice.max_size(count, length)


@pytest.mark.parametrize(("density", "bits"), [(0.001, 11.49), (0.01, 8.11), (0.0625, 5.48), (0.25, 3.29)])
def test_rice_bits_per_index(density, bits):
    length = 4_000_000
    indices = (torch.rand(length, generator=torch.Generator().manual_seed(1)) < density).nonzero().view(-1)
    rice, auto = INDEX_CODECS["rice"], INDEX_CODECS["auto"]
    measured = 8 * rice.size(indices, length) / indices.numel()
    floor = -(density * math.log2(density) + (1 - density) * math.log2(1 - density)) / density
    assert measured == pytest.approx(bits, rel=0.01)
    assert measured > floor * 0.99
    assert auto.size(indices, length) == rice.size(indices, length) + 1


def test_rice_parameter_is_the_best_one():
    length = 1_000_000
    for density in (0.001, 0.003, 0.01, 0.0625, 0.25, 0.5):
        indices = (torch.rand(length, generator=torch.Generator().manual_seed(2)) < density).nonzero().view(-1)
        gaps = torch.diff(indices, prepend=torch.tensor([-1])) - 1
        cost = {k: indices.numel() * (k + 1) + int((gaps >> k).sum()) for k in range(16)}
        chosen = RiceCodec.parameter(indices.numel(), length)
        assert cost[chosen] <= 1.002 * min(cost.values())


def test_run16_is_two_bytes_an_entry_and_a_filler():
    run16 = INDEX_CODECS["run16"]
    assert run16.size(random_indices(1_000_000, 10_000), 1_000_000) == 20_000
    assert run16.size(torch.tensor([65_534]), 1_000_000) == 2
    assert run16.size(torch.tensor([65_535]), 1_000_000) == 4
    assert run16.size(torch.tensor([131_070]), 1_000_000) == 6


def test_auto_takes_the_smallest():
    auto = INDEX_CODECS["auto"]
    cases = {0: random_indices(100_000, 100), 1: random_indices(100_000, 60_000), 2: torch.tensor([99_999_999])}
    for tag, indices in cases.items():
        length = 100_000 if tag < 2 else 100_000_000
        sizes = [INDEX_CODECS[name].size(indices, length) for name in ("rice", "bitmap", "int32")]
        buffer = auto.encode(indices, length)
        assert buffer.numel() == 1 + min(sizes)
        assert sizes[int(buffer[0])] == min(sizes)


@codecs
def test_damaged_buffers_are_refused(codec):
    indices = random_indices(10_000, 700)
    buffer = codec.encode(indices, 10_000)
    with pytest.raises(ValueError, match="damaged"):
        codec.decode(buffer, 699, 10_000)
    if codec.name == "auto":
        buffer[0] = 77
        with pytest.raises(ValueError, match="damaged"):
            codec.decode(buffer, 700, 10_000)


@given(bits=st.integers(0, 40), count=st.integers(0, 200), seed=st.integers(0, 1 << 30))
@settings(max_examples=80, deadline=None)
def test_bit_fields_round_trip(bits, count, seed):
    fields = torch.randint(0, 1 << bits, (count,), generator=torch.Generator().manual_seed(seed))
    packed = pack(fields | (1 << 50), bits)
    assert packed.numel() == packed_size(count, bits)
    assert packed.numel() <= math.ceil(bits * count / 8) + 3
    assert torch.equal(unpack(packed, count, bits), fields)


def test_flags_round_trip():
    flags = torch.randint(0, 2, (8 * 37,), dtype=torch.uint8)
    assert torch.equal(unpack_flags(pack_flags(flags)), flags)
    assert pack_flags(flags).numel() == 37


@codecs
def test_takes_strided_views(codec):
    indices = random_indices(5000, 300)
    for part in (indices[::3], indices[5::1000], indices[:0:7]):
        check_round_trip(codec, part, 5000)
