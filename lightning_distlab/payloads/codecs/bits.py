"""Fixed-width bit fields in bytes, planar.

Planar means: of the 8/w fields of w bits that share byte j, the i-th is element `i * n_bytes + j`, not `j * 8/w + i`.
So packing reads and writes whole contiguous rows, which vectorises; the interleaved order is many times slower.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _widths(bits: int) -> list[int]:
    """Split a field of `bits` into widths that divide a byte, lowest bits first.

    >>> _widths(9), _widths(6)
    ([8, 1], [4, 2])
    """
    whole, rest = divmod(bits, 8)
    return [8] * whole + [width for width in (4, 2, 1) if rest & width]


def packed_size(count: int, bits: int) -> int:
    """Bytes of `count` fields of `bits` bits each, each of the parts by `_widths` rounded up to bytes."""
    return sum((count * width + 7) // 8 for width in _widths(bits))


def pack_flags(flags: Tensor) -> Tensor:
    """Pack one bit per element.

    Args:
        flags: uint8, [8 * n_bytes], each 0 or 1.

    Returns:
        uint8, [n_bytes].
    """
    rows = flags.view(8, -1)
    packed = rows[0].clone()
    for row in range(1, 8):
        packed.bitwise_or_(rows[row] << row)
    return packed


def unpack_flags(packed: Tensor) -> Tensor:
    """The inverse of `pack_flags`: uint8, [8 * n_bytes], each 0 or 1."""
    flags = torch.empty(8, packed.numel(), dtype=torch.uint8, device=packed.device)
    for row in range(8):
        torch.bitwise_and(packed >> row, 1, out=flags[row])
    return flags.view(-1)


def pack(fields: Tensor, bits: int) -> Tensor:
    """Pack the low `bits` bits of each element.

    Args:
        fields: Integers of any type, [count], non-negative. Higher bits are ignored.
        bits: Width of a field, 0 to 63.

    Returns:
        uint8, [packed_size(count, bits)].
    """
    count, shift, parts = fields.numel(), 0, []
    for width in _widths(bits):
        part = (fields >> shift).bitwise_and_((1 << width) - 1).to(torch.uint8)
        shift += width
        if width < 8:
            per_byte = 8 // width
            rows = torch.nn.functional.pad(part, (0, -count % per_byte)).view(per_byte, -1)
            part = rows[0].clone()
            for row in range(1, per_byte):
                part.bitwise_or_(rows[row] << (row * width))
        parts.append(part)
    return torch.cat(parts) if parts else fields.new_empty(0, dtype=torch.uint8)


def unpack(packed: Tensor, count: int, bits: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """The inverse of `pack`: integers of a type that holds `bits` bits, [count]."""
    fields = torch.zeros(count, dtype=dtype, device=packed.device)
    start = shift = 0
    for width in _widths(bits):
        stop = start + (count * width + 7) // 8
        part = packed[start:stop]
        if width < 8:
            mask = (1 << width) - 1
            part = torch.cat([(part >> at).bitwise_and_(mask) for at in range(0, 8, width)])[:count]
        fields.bitwise_or_(part.to(dtype) << shift)
        start, shift = stop, shift + width
    return fields


def aligned(buffer: Tensor, itemsize: int) -> Tensor:
    """`buffer`, copied if it does not begin where items of `itemsize` bytes may: a typed view needs that."""
    return buffer.clone() if buffer.storage_offset() % itemsize else buffer


def as_bytes(items: Tensor) -> Tensor:
    """The bytes of a 1-D tensor, sharing memory where it is contiguous."""
    # A slice [a:b:step] of one element counts as contiguous and yet keeps its stride, which a view as bytes refuses.
    return items.contiguous().as_strided((items.numel(),), (1,)).view(torch.uint8)
