"""TernGrad (Wen et al., NeurIPS 2017), tensor by tensor.

Choices: clipping at 2.5 standard deviations, one scaler a tensor, the largest over the ranks; two bits a level on the
wire, planar; every rank decodes all messages and adds their levels. Vectors dense.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.compressors.common import WORLD, all_reduce, exchange

CLIP = 2.5


def pack(levels: Tensor) -> Tensor:
    """Levels -1, 0 and 1 as four in a byte. [n] -> uint8, [ceil(n / 4)]."""
    codes = torch.nn.functional.pad((levels + 1).to(torch.uint8), (0, -levels.numel() % 4)).view(4, -1)
    return codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6


def unpack(packed: Tensor, count: int) -> Tensor:
    """The inverse of `pack`: int8, [count]."""
    return torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)]).view(-1)[:count].to(torch.int8) - 1


class TernGrad:
    """Random levels whose mean is the gradient; no memory."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.sizes = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) > 1}
        self.generator = torch.Generator().manual_seed(0)

    def step(self, grads: Mapping[str, Tensor]) -> None:
        """One step; the gradients become averages in place."""
        clipped = {}
        for name in self.sizes:
            limit = CLIP * float(grads[name].std())
            clipped[name] = grads[name].view(-1).clamp(-limit, limit)
        mine = torch.stack([grad.abs().max() for grad in clipped.values()])
        scalers = torch.stack(exchange(mine)).amax(0)
        levels = []
        for grad, scaler in zip(clipped.values(), scalers, strict=True):
            chosen = torch.rand(grad.shape, generator=self.generator) < grad.abs() / scaler
            levels.append((grad.sign() * chosen).to(torch.int8))
        count = sum(self.sizes.values())
        total = torch.zeros(count, dtype=torch.int8)
        for message in exchange(pack(torch.cat(levels))):
            total += unpack(message, count)
        for name, scaler, piece in zip(self.sizes, scalers, total.split(list(self.sizes.values())), strict=True):
            grads[name].copy_((piece * (scaler / WORLD)).view_as(grads[name]))
        rest = [name for name in grads if name not in self.sizes]
        dense = torch.cat([grads[name].view(-1) for name in rest])
        all_reduce(dense)
        dense /= WORLD
        for name, piece in zip(rest, dense.split([grads[n].numel() for n in rest]), strict=True):
            grads[name].copy_(piece.view_as(grads[name]))
