"""Unbiased random rounding to integer levels of a scale that all ranks share."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from lightning_distlab.compression.base import Compression, Param, Step
from lightning_distlab.payloads import ExactPayload, LevelPayload, Op, Reply, Request, accumulation_dtype
from lightning_distlab.payloads.codecs.levels import level_dtype

_CHUNK = 1 << 17  # elements that are rounded together: they and their random numbers stay in a core's cache


class Uniform:
    """Random numbers in [0, 1) that belong to a parameter, a step and a rank, whatever the order of buckets.

    On a CPU they come from NumPy's SFC64, which is several times faster than PyTorch's generator there.
    """

    def __init__(self, param: Param, step: Step) -> None:
        name = zlib.crc32(param.name.encode())
        seed = np.random.SeedSequence([step.seed & 0xFFFFFFFF, name, step.index, step.rank])
        self._device = param.weight.device
        if self._device.type == "cpu":
            self._bits = np.random.SFC64(seed)
        else:
            self._generator = torch.Generator(self._device)
            self._generator.manual_seed(int(seed.generate_state(1, np.uint64)[0] >> np.uint64(1)))

    def draw(self, count: int) -> Tensor:
        """Odd multiples of 2^-24 below 1, fp32, [count]: exact, and neither 0 nor 1."""
        if self._device.type == "cpu":
            words = np.asarray(self._bits.random_raw((count + 1) // 2), dtype=np.uint64)
            integers = torch.from_numpy(words.view(np.int32))[:count]
        else:
            integers = torch.randint(1 << 24, (count,), device=self._device, generator=self._generator)
        return integers.bitwise_and_((1 << 24) - 1).bitwise_or_(1).to(torch.float32).mul_(2.0**-24)


def shared_scales(values: Tensor, block: int, limit: float | None) -> Tensor:
    """Largest magnitude of each block of a vector, but no more than `limit`.

    Args:
        values: [n].
        block: Elements of a block; the last may have fewer.
        limit: Where values are going to be clipped.

    Returns:
        [ceil(n / block)], fp32, or fp64 for fp64.
    """

    def largest(low: Tensor, high: Tensor) -> Tensor:
        return torch.maximum(high, -low).to(accumulation_dtype(values.dtype))

    whole = values.numel() // block
    rows, rest = values[: whole * block].view(whole, block), values[whole * block :]
    scales = []
    if whole == 1 and not rest.numel():
        scales.append(largest(*values.aminmax()).view(1))  # over a dimension it would be much slower
    elif whole:
        scales.append(largest(rows.amin(1), rows.amax(1)))
    if rest.numel():
        scales.append(largest(*rest.aminmax()).view(1))
    scale = torch.cat(scales)
    return scale if limit is None else scale.clamp_(max=limit)


def exchange_levels(
    grad: Tensor, param: Param, step: Step, *, bound: int, block: int, limit: float | None, code: str
) -> Compression:
    """Average a gradient that travels as random levels; `grad` becomes the average.

    With s the largest magnitude over all ranks of a block, level is bound g / s, rounded towards zero or away from it
    with the probability that makes bound g / s the expectation. The levels of all ranks count the same unit s / bound,
    so sums of them are integers, and exact.

    Args:
        grad: [n].
        param: The parameter.
        step: The step under way.
        bound: Largest level.
        block: Elements that share a scale.
        limit: Clip the gradient to [-limit, limit] first; None to leave it as it is.
        code: Of the levels on the wire.
    """
    reply: Reply = yield Request(Op.MAX, ExactPayload(shared_scales(grad, block, limit)))
    assert isinstance(reply.payload, ExactPayload)
    scales = reply.payload.values
    per_unit = torch.where(scales > 0, bound / scales, 0.0).to(torch.float32)
    per_unit = torch.nan_to_num(per_unit, posinf=0.0)  # a scale so small that its inverse overflows counts as zero
    levels = _draw(grad, per_unit, Uniform(param, step), bound, block, limit)
    reply = yield Request(Op.SUM, LevelPayload(levels, bound, code), final=True)
    assert isinstance(reply.payload, LevelPayload)
    unit = scales / (bound * step.world_size)
    for at, units in _chunks(grad.numel(), block, unit):
        if grad.dtype == units.dtype:
            torch.mul(reply.payload.levels[at], units, out=grad[at])
        else:  # a unit may be too small for half precision where its multiples are not
            grad[at] = reply.payload.levels[at].to(units.dtype) * units


def _draw(grad: Tensor, per_unit: Tensor, uniform: Uniform, bound: int, block: int, limit: float | None) -> Tensor:
    """Levels of a gradient: `level_dtype(bound)`, [n]."""
    levels = torch.empty(grad.numel(), dtype=level_dtype(bound), device=grad.device)
    for at, factors in _chunks(grad.numel(), block, per_unit):
        piece = grad[at].to(torch.float32)
        if limit is not None:
            piece = piece.clamp(-limit, limit)
        levels[at] = random_round(piece * factors, uniform, bound).clamp_(-bound, bound)
    return levels


def random_round(values: Tensor, uniform: Uniform, bound: int) -> Tensor:
    """Each value, overwritten, becomes one of its two neighbouring integers, right on average; integers stay.

    Between -1 and 1 that is ⌈v - u⌉, exact to 2^-24, since u is neither 0 nor 1. With larger values the difference
    would be rounded, and some integers would move; there the part behind the point decides by itself.

    Args:
        values: fp32, [n], no larger than `bound` but for rounding.
        uniform: Gives u.
        bound: Largest magnitude.
    """
    if bound == 1:
        return values.sub_(uniform.draw(values.numel())).ceil_()
    whole = values.trunc()
    part = values.sub_(whole)
    up = uniform.draw(part.numel()) < part.abs()
    return whole.add_(part.sign_().mul_(up))


def _chunks(numel: int, block: int, factors: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Ranges of positions, and the factor of each element there, or one factor for all."""
    size = _CHUNK if block >= numel else max(1, _CHUNK // block) * block
    for start in range(0, numel, size):
        at = slice(start, min(numel, start + size))
        if block >= numel:
            yield at, factors
        else:
            own = factors[start // block : -(-at.stop // block)]
            yield at, own.repeat_interleave(block)[: at.stop - start]
