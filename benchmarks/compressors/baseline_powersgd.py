"""PowerSGD (Vogels, Karimireddy, Jaggi, NeurIPS 2019), algorithm 1 with error feedback, layer by layer.

Choices: warm start, local residual M - P Q_w^T, vectors dense, Gram-Schmidt for rank 1 and 2 and QR above.
All P travel in one flat buffer, then all Q, as one all-reduce each; dense tensors travel with P.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.compressors.common import WORLD, all_reduce


def orthogonalize(matrix: Tensor) -> Tensor:
    """An orthonormal basis of the columns, [n, r]."""
    if matrix.shape[1] > 2:
        return torch.linalg.qr(matrix).Q
    for i in range(matrix.shape[1]):
        column = matrix[:, i]
        column /= column.norm() + 1e-8
        if i + 1 < matrix.shape[1]:
            rest = matrix[:, i + 1 :]
            rest -= torch.outer(column, column @ rest)
    return matrix


class PowerSGD:
    """Rank r with error feedback and warm start."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], rank: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.errors: dict[str, Tensor] = {}
        self.q: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            n, m = shape[0], math.prod(shape[1:])
            if len(shape) > 1 and 2 * rank * (n + m) < n * m:
                self.errors[name] = torch.zeros(n, m)
                self.q[name] = torch.randn(m, rank, generator=generator)

    def step(self, grads: Mapping[str, Tensor]) -> None:
        """One step; the gradients become averages in place."""
        matrices, p = {}, {}
        for name, error in self.errors.items():
            matrices[name] = grads[name].view(error.shape) + error
            p[name] = matrices[name] @ self.q[name]
        dense = {name: grad for name, grad in grads.items() if name not in p}
        self._average({**p, **dense})
        q = {}
        for name, matrix in matrices.items():
            p[name] = orthogonalize(p[name])
            q[name] = matrix.t() @ p[name]
            torch.sub(matrix, p[name] @ q[name].t(), out=self.errors[name])
        self._average(q)
        for name, factor in q.items():
            self.q[name] = factor
            grads[name].copy_((p[name] @ factor.t()).view_as(grads[name]))

    @staticmethod
    def _average(tensors: Mapping[str, Tensor]) -> None:
        """Average tensors as one flat buffer."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
        all_reduce(flat)
        flat /= WORLD
        pieces = flat.split([tensor.numel() for tensor in tensors.values()])
        for tensor, piece in zip(tensors.values(), pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))
