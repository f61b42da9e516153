"""Value codecs: floating-point values to bytes and back.

A payload's values are rounded once, by `round`, and what that takes away goes back to the sender's residual. Two rules
make this exact, for every codec and dtype here:

- `values - round(values)` has no rounding error of its own, so `round(values) + (values - round(values))` is `values`
  bit for bit. Every rounded value is either 0 or within a factor of two of the original, and such differences are exact
  (Sterbenz 1974). The exception is a double beyond the range of `fp32` or `bf16`, which those clamp.
- Rounded values, and any subset of them, pass `encode` and `decode` unchanged. So scales are powers of two that follow
  from the *rounded* maximum, and a smaller maximum never coarsens the grid.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_distlab.payloads.codecs.bits import aligned, as_bytes


class ValueCodec(ABC):
    """Finite floating-point values to bytes and back.

    Attributes:
        name: The word that a user writes.
    """

    name: str

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Write values.

        Args:
            values: Floating point, [count], finite.

        Returns:
            uint8, [size(count)]. May share memory with `values`.
        """

    @abstractmethod
    def decode(self, buffer: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Read values.

        Args:
            buffer: uint8, [size(count)].
            count: Number of values in it.
            dtype: Floating-point type to return, that of the encoded values.

        Returns:
            [count]. May share memory with `buffer`.
        """

    @abstractmethod
    def size(self, count: int) -> int:
        """Exact number of bytes of `count` values."""

    def round(self, values: Tensor) -> Tensor:
        """The values that arrive: `decode(encode(values))`, in the dtype of `values`."""
        return self.decode(self.encode(values), values.numel(), values.dtype)


class PlainCodec(ValueCodec):
    """Values as a machine type, without a scale.

    Values beyond the range of the type become its largest finite one.

    Args:
        name: The word that a user writes.
        dtype: What travels.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype

    @override
    def encode(self, values: Tensor) -> Tensor:
        ours, theirs = torch.finfo(self.dtype), torch.finfo(values.dtype)
        if ours.max < theirs.max or ours.eps > theirs.eps:  # else nothing can round beyond the end of the range
            limit = _largest(self.dtype, values.dtype)
            values = values.clamp(-limit, limit)
        return as_bytes(values.to(self.dtype))

    @override
    def decode(self, buffer: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return aligned(buffer, self.dtype.itemsize).view(self.dtype).to(dtype)

    @override
    def size(self, count: int) -> int:
        return count * self.dtype.itemsize


def _largest(dtype: torch.dtype, within: torch.dtype) -> float:
    """The largest finite number of `dtype` that `within` can hold too."""
    ours, theirs = torch.finfo(dtype), torch.finfo(within)
    if ours.max <= theirs.max:
        return ours.max
    # All of these types share the form (2 - eps) * 2^e for their largest number.
    exponent = math.frexp(theirs.max)[1]
    return math.ldexp(2 - max(ours.eps, theirs.eps), exponent - 1)


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Where scaling is done: half-precision types lack the exponents for it."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _times_power_of_two(values: Tensor, exponent: int) -> Tensor:
    """`values * 2^exponent` in two steps, as 2^exponent alone may overflow where the product does not."""
    half = exponent // 2
    return (values * 2.0**half).mul_(2.0 ** (exponent - half))


def _max_magnitude(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


_EXPONENT_BYTES = 2


def _with_exponent(exponent: int, body: Tensor) -> Tensor:
    """[exponent: int16][body], uint8."""
    header = torch.tensor([exponent], dtype=torch.int16, device=body.device).view(torch.uint8)
    return torch.cat([header, as_bytes(body)])


def _exponent(buffer: Tensor) -> int:
    return int(aligned(buffer[:_EXPONENT_BYTES], _EXPONENT_BYTES).view(torch.int16))


class Float16Codec(ValueCodec):
    """IEEE half precision times one power of two, chosen so that the largest magnitude lies in half's top binade.

    So nothing overflows, and what is up to 2^29 times smaller than the largest keeps all 11 bits; what is more than
    2^41 times smaller becomes 0. Layout: [exponent: int16][values: half].
    """

    name = "fp16"

    @staticmethod
    def _scale_exponent(values: Tensor) -> int:
        """The power of two that moves max |v|, rounded to 11 bits, into [2^15, 2^16)."""
        peak = _max_magnitude(values)
        mantissa, exponent = math.frexp(peak)  # mantissa in [0.5, 1), or 0
        rounds_up = round(mantissa * 2048) == 2048
        if rounds_up and math.ldexp(1.0, exponent - 1) * 2 <= torch.finfo(values.dtype).max:
            exponent += 1
        return 16 - exponent if peak else 0

    @override
    def encode(self, values: Tensor) -> Tensor:
        exponent = self._scale_exponent(values)
        scaled = _times_power_of_two(values.to(_work_dtype(values.dtype)), exponent)
        # Clamps only what would round up to infinity at the very end of the range of `values` itself.
        return _with_exponent(exponent, scaled.clamp_(-65504.0, 65504.0).to(torch.float16))

    @override
    def decode(self, buffer: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        scaled = aligned(buffer[_EXPONENT_BYTES:], 2).view(torch.float16).to(_work_dtype(dtype))
        return _times_power_of_two(scaled, -_exponent(buffer)).to(dtype)

    @override
    def size(self, count: int) -> int:
        return _EXPONENT_BYTES + 2 * count


class Log8Codec(ValueCodec):
    """Sign and a 7-bit logarithm: 127 levels, 7.5 an octave, downwards from the largest magnitude, and an exact 0.

    Level j is 2^(j / 7.5) for an integer j, so all payloads share one grid and only differ in which 127 levels of it
    they can name. Neighbours are 9.7 % apart, so the relative error is 4.8 % at most, over 16.8 octaves (a factor of
    114,000); what is smaller becomes 0, as does what is below the normal numbers of the dtype.
    Layout: [j of the top level: int16][codes: sign << 7 | level, 0 is zero].
    """

    name = "int8"
    per_octave: ClassVar[float] = 7.5
    # 2^(r / 15) as 24-bit numbers, so that levels are the same in every dtype from fp32 on.
    _mantissas: ClassVar[list[float]] = torch.tensor([2.0 ** (r / 15) for r in range(15)], dtype=torch.float32).tolist()

    @classmethod
    def _level(cls, j: int) -> float:
        octave, r = divmod(2 * j, 15)
        return math.ldexp(cls._mantissas[r], octave)

    @classmethod
    def _range(cls, dtype: torch.dtype) -> tuple[int, int]:
        """The lowest and the highest j whose level is a normal number of `dtype`."""
        info = torch.finfo(dtype)
        low = math.ceil(math.log2(info.smallest_normal) * cls.per_octave)
        high = math.ceil(math.log2(info.max) * cls.per_octave) - 1  # the level above rounds to or is beyond 2^e_max
        return low, high

    @override
    def encode(self, values: Tensor) -> Tensor:
        low, high = self._range(values.dtype)
        peak = _max_magnitude(values)
        top = min(high, max(low, round(math.log2(peak) * self.per_octave))) if peak else low
        work = values.to(_work_dtype(values.dtype))
        j = work.abs().log2_().mul_(self.per_octave).round_()  # [count], -inf for 0
        codes = (j - (top - 127)).clamp_(0, 127).masked_fill_(j < low, 0).to(torch.uint8)
        codes.bitwise_or_((work < 0).to(torch.uint8) << 7)
        return _with_exponent(top, codes)

    @override
    def decode(self, buffer: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        top = _exponent(buffer)
        half = [0.0] + [self._level(top - 127 + code) for code in range(1, 128)]
        table = torch.tensor(half + [-level for level in half], dtype=dtype, device=buffer.device)
        return table[buffer[_EXPONENT_BYTES:].to(torch.int64)]

    @override
    def size(self, count: int) -> int:
        return _EXPONENT_BYTES + count


VALUE_CODECS: dict[str, ValueCodec] = {
    codec.name: codec
    for codec in (
        PlainCodec("fp32", torch.float32),
        PlainCodec("fp64", torch.float64),
        Float16Codec(),
        PlainCodec("bf16", torch.bfloat16),
        Log8Codec(),
    )
}
"""Value codecs by the name that `Wire.value` and `Wire.dense` take."""
