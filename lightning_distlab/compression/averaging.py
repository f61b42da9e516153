"""What all compressors share: writing an average, and the dense exchange of tensors that are not compressed."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_distlab.compression.base import Compression, State
from lightning_distlab.payloads import DensePayload, Op, Payload, Reply, Request, SparsePayload


def entries(density: float, numel: int) -> int:
    """Number of entries that a density makes of a tensor: rounded to the nearest, at least one where there is one."""
    return min(numel, max(1, round(density * numel)))


def write_average(total: Payload, grad: Tensor, world_size: int) -> None:
    """Write `total / world_size` into `grad`, in place; the two may share storage.

    Args:
        total: Sum over ranks, of `grad.numel()` elements.
        grad: 1-D.
        world_size: Number of addends.
    """
    if isinstance(total, SparsePayload):
        grad.zero_()
        grad.index_copy_(0, total.indices, (total.values / world_size).to(grad.dtype))
    else:
        assert isinstance(total, DensePayload)
        torch.div(total.values, world_size, out=grad)


def dense_average(grad: Tensor, values: Tensor, state: State, world_size: int, keep_error: bool) -> Compression:
    """Average `values` over ranks into `grad`, with nothing compressed but for the wire's rounding.

    What a lossy wire (a half-precision dense tail, say) rounds away is kept in `state["rounding"]` and added at the
    next step. That residual is allocated when the first error comes back, so it costs nothing on an exact wire.

    fp16 is divided before the sum, because a backend that adds in fp16 overflows at 65504.

    Args:
        grad: 1-D, where the average goes.
        values: 1-D, what is averaged, of `grad`'s dtype; may be `grad` itself.
        state: Memory of the parameter.
        world_size: Ranks that average.
        keep_error: Keep the rounding error; else it is dropped and no state is used.
    """
    residual = state.get("rounding") if keep_error else None
    if residual is not None:
        values = values + residual
    early = world_size if values.dtype == torch.float16 else 1
    lost: Tensor | None = None
    if early > 1:
        whole, values = values, values / early
        lost = whole - values * early  # what is too small for a fraction of it
    reply: Reply = yield Request(Op.SUM, DensePayload(values), final=True)
    if keep_error and reply.returned is not None:
        assert isinstance(reply.returned, DensePayload)
        returned = (reply.returned.values * early).to(grad.dtype)
        state["rounding"] = returned if lost is None else returned + lost
    elif keep_error and lost is not None and bool(lost.any()):
        state["rounding"] = lost
    elif residual is not None:
        residual.zero_()
    write_average(reply.payload, grad, world_size // early)


def put_back(returned: Payload | None, residual: Tensor) -> None:
    """Add to a residual what did not get through: rounding errors of the wire and entries that lost."""
    if isinstance(returned, SparsePayload):
        residual.index_add_(0, returned.indices, returned.values.to(residual.dtype))
    elif returned is not None:
        assert isinstance(returned, DensePayload)
        residual.add_(returned.values)
