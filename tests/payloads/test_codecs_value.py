import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_distlab.payloads.codecs import VALUE_CODECS

codecs = pytest.mark.parametrize("codec", VALUE_CODECS.values(), ids=VALUE_CODECS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def any_values(draw, dtype, codec):
    """Arbitrary bit patterns: all exponents, denormals and both zeros; only what is not finite is replaced."""
    info = torch.iinfo(BITS[dtype])
    patterns = draw(st.lists(st.integers(info.min, info.max), max_size=40))
    values = torch.tensor(patterns, dtype=BITS[dtype]).view(dtype)
    values = torch.where(values.isfinite(), values, torch.ones_like(values))
    if dtype == torch.float64 and codec.name in ("fp32", "bf16"):  # doubles beyond these are clamped, see below
        values = torch.where(values.abs() < 3e38, values, torch.ones_like(values))
    width = draw(st.sampled_from([None, 1.0, 1e-3, 1e-30]))  # like a real payload: all within a few octaves
    if width is not None:
        values = torch.rand(values.numel(), generator=torch.Generator().manual_seed(len(patterns))).to(dtype) * width
    return values


def check(codec, values):
    rounded = codec.round(values)
    assert rounded.dtype == values.dtype
    assert rounded.isfinite().all()
    buffer = codec.encode(values)
    assert buffer.dtype == torch.uint8
    assert buffer.numel() == codec.size(values.numel())
    assert torch.equal(codec.decode(buffer, values.numel(), values.dtype), rounded)
    error = values - rounded
    assert torch.equal(rounded + error, values)
    assert torch.equal(error.double(), values.double() - rounded.double()) or values.dtype == torch.float64
    assert torch.equal(codec.round(rounded), rounded)
    return rounded


@codecs
@dtypes
@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_error_is_exact_and_rounding_is_idempotent(codec, dtype, data):
    values = any_values(data.draw, dtype, codec)
    rounded = check(codec, values)
    # Any part of a rounded payload travels without loss, whatever its own scale is.
    part = rounded[data.draw(st.integers(0, 5)) :: data.draw(st.integers(1, 4))]
    assert torch.equal(codec.round(part), part)


@codecs
@dtypes
def test_edges_of_the_range(codec, dtype):
    info = torch.finfo(dtype)
    largest = min(info.max, torch.finfo(torch.float32).max) if codec.name in ("fp32", "bf16") else info.max
    for values in (
        [],
        [0.0],
        [largest],
        [-largest, largest / 2],
        [info.smallest_normal],
        [info.tiny / 2, info.tiny / 4],
    ):
        check(codec, torch.tensor(values, dtype=dtype))
    just_below_powers = torch.tensor([2.0**n for n in range(-14, 15)], dtype=dtype) * (1 - info.eps / 2)
    check(codec, just_below_powers)
    for value in just_below_powers:
        check(codec, value.view(1))


@codecs
def test_exact_zeros_and_signs(codec):
    values = torch.tensor([0.0, 1.0, -1.0, 0.0, -2.5])
    rounded = check(codec, values)
    assert torch.equal(rounded.sign(), values.sign())


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("fp64", torch.float64), ("fp64", torch.float32)])
def test_lossless_codecs(name, dtype):
    values = torch.randn(1000, dtype=dtype) * 10.0 ** torch.randint(-30, 30, (1000,))
    assert torch.equal(VALUE_CODECS[name].round(values), values)


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp16", torch.bfloat16)]
)
def test_half_precision_travels_unchanged(name, dtype):
    values = torch.randn(1000).to(dtype)
    assert torch.equal(VALUE_CODECS[name].round(values), values)


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1.0, 1e6, 1e30])
def test_fp16_neither_overflows_nor_underflows(scale):
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).clamp_min(1e-6) * scale
    relative = ((values - VALUE_CODECS["fp16"].round(values)) / values).abs()
    assert relative.max() <= 2**-11


def test_bf16_relative_error():
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    assert ((values - VALUE_CODECS["bf16"].round(values)) / values).abs().max() <= 2**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_int8_spans_16_octaves_within_5_percent(dtype):
    octaves = torch.linspace(0, -16, 20_000, dtype=torch.float64)
    values = (torch.exp2(octaves) * 0.37).to(dtype)
    relative = ((values - VALUE_CODECS["int8"].round(values)) / values).abs()
    assert relative.max() <= 0.05
    assert relative.max() > 0.04  # the grid is no finer than its 127 levels allow
    assert VALUE_CODECS["int8"].size(1000) == 1002


def test_int8_drops_what_is_far_below_the_largest():
    rounded = VALUE_CODECS["int8"].round(torch.tensor([1.0, 2.0**-16, 2.0**-18]))
    assert rounded[1] != 0
    assert rounded[2] == 0


@pytest.mark.parametrize(("name", "limit"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_doubles_beyond_the_range_are_clamped(name, limit):
    values = torch.tensor([1e300, -1e300, 3.4e38 * 2], dtype=torch.float64)
    largest = torch.finfo(limit).max
    assert VALUE_CODECS[name].round(values).tolist() == [largest, -largest, largest]


def test_sizes():
    sizes = {name: codec.size(1000) for name, codec in VALUE_CODECS.items()}
    assert sizes == {"fp32": 4000, "fp64": 8000, "fp16": 2002, "bf16": 2000, "int8": 1002}


@codecs
def test_decodes_from_any_offset(codec):
    values = torch.randn(33)
    buffer = codec.encode(values)
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), buffer])[3:]
    assert torch.equal(codec.decode(shifted, 33, torch.float32), codec.round(values))


def test_every_int8_level_survives():
    levels = torch.tensor([math.ldexp(1.0, e) for e in range(-120, 120)])
    rounded = VALUE_CODECS["int8"].round(levels)
    assert torch.equal(VALUE_CODECS["int8"].round(rounded), rounded)
    for level in rounded[rounded != 0]:
        assert torch.equal(VALUE_CODECS["int8"].round(level.view(1)), level.view(1))
