"""PowerSGD (Vogels, Karimireddy, Jaggi, NeurIPS 2019): two thin factors instead of a matrix."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_distlab.compression import checks
from lightning_distlab.compression.averaging import dense_average
from lightning_distlab.compression.base import Compression, Compressor, Param, State, Step
from lightning_distlab.compression.exclusion import Exclusion
from lightning_distlab.payloads import DensePayload, Op, Reply, Request, RoundSpec, accumulation_dtype

_BLOCK_BYTES = 1 << 19  # fits into a core's cache


class PowerSGD(Compressor):
    """One step of power iteration on the averaged gradient, started from the step before (algorithm 1 and 2).

    With local gradient g of a weight [n, m], its error e, and Q [m, r], the same on all ranks:

        M ← e + g
        P ← M Q;  P ← Σ P over ranks          first round,  n r elements
        P̂ ← an orthonormal basis of P
        Q_w ← Mᵀ P̂;  Q ← (1/N) Σ Q_w          second round, m r elements
        G ← P̂ Qᵀ
        e ← M - P̂ Q_wᵀ

    The residual is the local one: what of this rank's own M is not in what this rank contributed. The paper's
    algorithm and PyTorch's hook keep M - P̂ Qᵀ, which has the same mean over ranks and gives the same trajectory, but
    each rank's error then walks at random with the differences between the ranks' gradients, and grows like √steps.

    The basis comes from a Householder QR, whose columns are orthonormal whatever P is: a column that has vanished, or
    depends on others, is replaced by some unit vector, and so a matrix that was zero for a while, or whose rank was
    too low, is seen again in the next step.

    A weight of more dimensions is viewed as [largest stride, rest]: [out, in·kh·kw] for a convolution, and the same
    elements in memory order for a channels-last one. Tensors of dimension 0 and 1 are averaged densely, and so are
    matrices for which r (n + m) elements are not fewer than n m / `min_compression_rate`.

    The factors are dense vectors, so any collective that adds can carry them, the backend's own included. Momentum
    and weight decay stay in the optimizer. Half-precision gradients are factored in fp32.

    Memory: e, as large as the parameter; Q with a warm start. State keys: `error`, `q` (Qᵀ, [r · m]); `rounding` for
    what a lossy wire takes from a dense tensor (allocated when needed). What it rounds off P changes the basis and
    nothing else; what it rounds off Q goes back into e.

    Args:
        rank: r. The paper's are 1, 2 and 4 (7 at most).
        warm_start: Begin with the Q of the step before; without it, with a random one, the same on all ranks, drawn
            anew at every step (the paper: 94.0 instead of 94.4 % at rank 2).
        min_compression_rate: Factors must be at least that many times smaller than the matrix, else it travels whole.
        exclude: Average parameters densely whose name matches one of these shell patterns.

    Raises:
        ValueError: An option is outside its range.
    """

    name: ClassVar[str] = "powersgd"
    rounds = (RoundSpec(Op.SUM, DensePayload), RoundSpec(Op.SUM, DensePayload))

    def __init__(
        self,
        *,
        rank: int = 2,
        warm_start: bool = True,
        min_compression_rate: float = 2.0,
        exclude: Sequence[str] = (),
    ) -> None:
        self.rank = checks.positive_integer("rank", rank)
        self.warm_start = checks.switch("warm_start", warm_start)
        self.min_compression_rate = checks.at_least_one("min_compression_rate", min_compression_rate)
        self.exclusion = Exclusion(vectors=True, min_numel=0, patterns=checks.patterns("exclude", exclude))

    @override
    def init_state(self, param: Param) -> State:
        if self.reason(param) is not None:
            return {}
        dtype = accumulation_dtype(param.weight.dtype)
        state = {"error": torch.zeros(param.weight.numel(), dtype=dtype, device=param.weight.device)}
        if self.warm_start:
            state["q"] = self._random_start(param, 0).view(-1)
        return state

    def reason(self, param: Param) -> str | None:
        """Why this parameter is averaged densely, or None when it is factored."""
        reason = self.exclusion.reason(param)
        if reason is not None:
            return reason
        n, m = matrix_shape(param.weight)
        if self.min_compression_rate * self.rank * (n + m) >= n * m:
            return f"rank {self.rank} saves less than {self.min_compression_rate:g}x"
        return None

    @override
    def exchange(self, grad: Tensor, state: State, param: Param, step: Step) -> Compression:
        if self.reason(param) is not None:
            yield from dense_average(grad, grad, state, step.world_size, keep_error=True)
            return
        n, m = matrix_shape(param.weight)
        error, gradient = state["error"].view(n, m), grad.view(n, m)
        # Factors are kept transposed, as r long rows.
        q = state["q"].view(self.rank, m) if self.warm_start else self._random_start(param, step.index)
        reply: Reply

        p = torch.empty(self.rank, n, dtype=error.dtype, device=error.device)  # Pᵀ
        for rows, block in _matrix_blocks(error, gradient, step):
            torch.mm(q, block.t(), out=p[:, rows])
        reply = yield Request(Op.SUM, DensePayload(p.view(-1)))
        assert isinstance(reply.payload, DensePayload)
        basis = orthonormal_basis(reply.payload.values.view(self.rank, n).t())

        own = torch.zeros(self.rank, m, dtype=error.dtype, device=error.device)  # Q_wᵀ
        for rows, block in _matrix_blocks(error, gradient, step):
            own.addmm_(basis[rows].t(), block)
        # A copy travels, since a backend reduces in place.
        reply = yield Request(Op.SUM, DensePayload(own.clone().view(-1)), final=True)
        assert isinstance(reply.payload, DensePayload)
        if reply.returned is not None:
            assert isinstance(reply.returned, DensePayload)
            own -= reply.returned.values.view(self.rank, m)
        mean = (reply.payload.values / step.world_size).view(self.rank, m)
        for rows, block in _matrix_blocks(error, gradient, step):
            torch.addmm(block, basis[rows], own, alpha=-1.0, out=error[rows])
            gradient[rows] = torch.mm(basis[rows], mean, out=block)
        if self.warm_start:
            state["q"].copy_(mean.view(-1))

    def _random_start(self, param: Param, index: int) -> Tensor:
        """Qᵀ with normally distributed entries, [r, m], from the parameter's name: the same on all ranks."""
        _, m = matrix_shape(param.weight)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{index}/{param.name}".encode()))
        dtype = accumulation_dtype(param.weight.dtype)
        return torch.randn(self.rank, m, generator=generator, dtype=dtype).to(param.weight.device)

    @override
    def describe(self, params: Mapping[str, Param]) -> str:
        start = "warm start" if self.warm_start else "random start at every step"
        return f"powersgd: rank {self.rank}, {start}; {self.exclusion.describe(params, self.reason)}"


def matrix_shape(weight: Tensor) -> tuple[int, int]:
    """Sizes n and m of the matrix that a weight's elements are in memory order: n is the outermost dimension."""
    # Dimensions of one element have any stride: they say nothing about the order in memory.
    dims = [dim for dim in range(weight.dim()) if weight.size(dim) != 1]
    n = weight.size(max(dims, key=lambda dim: (weight.stride(dim), -dim))) if dims else 1
    return n, weight.numel() // n if n else 0


def orthonormal_basis(matrix: Tensor) -> Tensor:
    """Orthonormal columns, r of them, whose span contains the columns of `matrix`.

    Args:
        matrix: [n, r], r <= n, of any rank. NaN gives NaN.

    Returns:
        [n, r].
    """
    basis: Tensor = torch.linalg.qr(matrix).Q
    return basis


def _matrix_blocks(error: Tensor, gradient: Tensor, step: Step) -> Iterator[tuple[slice, Tensor]]:
    """Rows of M = e + g, some at a time in one piece of scratch, so that they are worked on in cache.

    M is laid down anew for each of the three passes, since nothing in scratch outlives a round. That costs no more
    than reading it from memory would. And a gradient begins wherever its bucket has put it, which may change from one
    run to the next and would change the last bits of a matrix product: the copy always begins at the same alignment.

    Args:
        error: e, [n, m].
        gradient: g, [n, m].
        step: Gives scratch.

    Yields:
        A range of rows, and M there, which may be overwritten.
    """
    n, m = error.shape
    count = min(n, max(1, _BLOCK_BYTES // (m * error.element_size())))
    scratch = step.scratch.take(error[:count].view(-1), purpose="block").view(count, m)
    for start in range(0, n, count):
        rows = slice(start, min(start + count, n))
        yield rows, torch.add(error[rows], gradient[rows], out=scratch[: rows.stop - start])
