"""Small integers, each in [-bound, bound], to bytes and back.

Two codes: `bits`, fields of the fewest bits that hold 2 bound + 1 values; and `base3`, for bound 1 alone, five
three-valued digits in a byte (3^5 = 243), which is 1.6 bits an element where the entropy of three equally likely
values is 1.585. Both are planar (see `bits`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_distlab.payloads.codecs.bits import pack, packed_size, unpack

LEVEL_CODES = ("bits", "base3")
_DIGITS = 5


def level_dtype(bound: int) -> torch.dtype:
    """The narrowest integer type in which levels up to `bound`, and twice that, can be computed with."""
    if bound <= 127:
        return torch.int8
    return torch.int16 if bound < 1 << 14 else torch.int32


def levels_size(count: int, bound: int, code: str) -> int:
    """Exact number of bytes of `count` levels."""
    if code == "base3" and bound == 1:
        return -(-count // _DIGITS)
    return packed_size(count, _width(bound))


def encode_levels(levels: Tensor, bound: int, code: str) -> Tensor:
    """Write levels.

    Args:
        levels: `level_dtype(bound)`, [count], each in [-bound, bound].
        bound: Largest magnitude.
        code: `bits`, or `base3`, which stands for `bits` where the bound is not 1.

    Returns:
        uint8, [levels_size(count, bound, code)].
    """
    # Eight-bit numbers wrap around, and 2 * 127 fits again.
    fields = (levels.view(torch.uint8) if levels.dtype == torch.int8 else levels) + bound
    if code != "base3" or bound != 1:
        return pack(fields, _width(bound))
    rows = torch.nn.functional.pad(fields, (0, -fields.numel() % _DIGITS)).view(_DIGITS, -1)
    packed = rows[-1].clone()
    for row in range(_DIGITS - 2, -1, -1):
        packed.mul_(3).add_(rows[row])
    return packed


def decode_levels(buffer: Tensor, count: int, bound: int, code: str) -> Tensor:
    """Read what `encode_levels` has written: `level_dtype(bound)`, [count]."""
    dtype = level_dtype(bound)
    if code == "base3" and bound == 1:
        rest, rows = buffer, []
        for _ in range(_DIGITS):
            thirds = torch.div(rest, 3, rounding_mode="floor")
            rows.append(rest - 3 * thirds)
            rest = thirds
        fields = torch.cat(rows)[:count]
    else:
        fields = unpack(buffer, count, _width(bound), torch.uint8 if dtype == torch.int8 else dtype)
    fields -= bound
    return fields.view(torch.int8) if dtype == torch.int8 else fields


def _width(bound: int) -> int:
    """Bits that hold 0, 1, ..., 2 bound."""
    return (2 * bound).bit_length()
