"""1-bit SGD (Seide et al., Interspeech 2014), tensor by tensor, in its two phases.

Choices: two means for the weights into each neuron (a row of PyTorch's matrices); each of the two ranks owns half of
the rows of every tensor, adds what it is sent, and quantises the sum again with a residual of its own. Vectors dense.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.compressors.common import WORLD, all_reduce, exchange, pack_bits, unpack_bits


def quantise(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Bits of a matrix [n, m], packed, and the means of the negative and of the other entries of each row, [n, 2]."""
    positive = matrix >= 0
    count = positive.sum(1)
    high = (matrix * positive).sum(1) / count.clamp(min=1)
    low = (matrix * ~positive).sum(1) / (matrix.shape[1] - count).clamp(min=1)
    return pack_bits(positive.view(-1)), torch.stack([low, high], 1)


def restore(bits: Tensor, means: Tensor, shape: torch.Size) -> Tensor:
    """The matrix that bits and means stand for."""
    return torch.where(unpack_bits(bits, shape.numel()).view(shape), means[:, 1:], means[:, :1])


class OneBit:
    """One bit an element, two numbers a row, error feedback at the worker and at the owner."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        matrices = {name: (shape[0], math.prod(shape[1:])) for name, shape in shapes.items() if len(shape) > 1}
        self.errors = {name: torch.zeros(shape) for name, shape in matrices.items()}
        self.owners = {name: torch.zeros(n // WORLD, m) for name, (n, m) in matrices.items()}

    def step(self, grads: Mapping[str, Tensor]) -> None:
        """One step; the gradients become averages in place."""
        for name, error in self.errors.items():
            owner, own_rows = self.owners[name], len(self.owners[name])
            matrix = grads[name].view(error.shape) + error
            total, halves = owner.clone(), []
            for half in matrix.split(own_rows):
                bits, means = quantise(half)
                halves.append(restore(bits, means, half.shape))
                if len(halves) == 1:  # this rank owns the first half of the rows; the other half leaves
                    for b, v in zip(exchange(bits), exchange(means), strict=True):
                        total += restore(b, v, half.shape)
            torch.sub(matrix, torch.cat(halves), out=error)
            bits, means = quantise(total)
            torch.sub(total, restore(bits, means, total.shape), out=owner)
            pieces = [restore(b, v, total.shape) for b, v in zip(exchange(bits), exchange(means), strict=True)]
            grads[name].copy_((torch.cat(pieces) / WORLD).view_as(grads[name]))
        rest = [name for name in grads if name not in self.errors]
        dense = torch.cat([grads[name].view(-1) for name in rest])
        all_reduce(dense)
        dense /= WORLD
        for name, piece in zip(rest, dense.split([grads[n].numel() for n in rest]), strict=True):
            grads[name].copy_(piece.view_as(grads[name]))
