"""Deep Gradient Compression (Lin et al., ICLR 2018), tensor by tensor, with an exact top-k.

Choices: heavy-ball momentum correction, momentum factor masking, no clipping, vectors dense with momentum after the
average; indices as int32, values as fp32, one all-gather of each for all tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.compressors.common import WORLD, all_reduce, exchange

MOMENTUM = 0.9


class PlainDGC:
    """The largest share `density` of the accumulated velocity of each tensor."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], density: float) -> None:
        self.density = density
        self.sparse = [name for name, shape in shapes.items() if len(shape) > 1]
        self.u = {name: torch.zeros(math.prod(shape)) for name, shape in shapes.items()}
        self.v = {name: torch.zeros(math.prod(shapes[name])) for name in self.sparse}

    def step(self, grads: Mapping[str, Tensor]) -> None:
        """One step; the gradients become averages in place."""
        indices, values, offset = [], [], 0
        for name in self.sparse:
            u, v = self.u[name], self.v[name]
            u.mul_(MOMENTUM).add_(grads[name].view(-1))
            v.add_(u)
            chosen = v.abs().topk(max(1, round(self.density * v.numel()))).indices
            indices.append(chosen + offset)
            values.append(v[chosen])
            v[chosen] = 0
            u[chosen] = 0
            offset += v.numel()
        everyone = zip(exchange(torch.cat(indices).int()), exchange(torch.cat(values)), strict=True)
        total = torch.zeros(offset)
        for places, numbers in everyone:
            total.index_add_(0, places.long(), numbers)
        total /= WORLD
        for name, piece in zip(self.sparse, total.split([self.v[n].numel() for n in self.sparse]), strict=True):
            grads[name].copy_(piece.view_as(grads[name]))
        rest = [name for name in grads if name not in self.v]
        dense = torch.cat([grads[name].view(-1) for name in rest])
        all_reduce(dense)
        dense /= WORLD
        for name, piece in zip(rest, dense.split([grads[n].numel() for n in rest]), strict=True):
            self.u[name].mul_(MOMENTUM).add_(piece)
            grads[name].copy_(self.u[name].view_as(grads[name]))
