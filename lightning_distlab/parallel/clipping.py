"""The one clipping function across all mesh axes.

The norm of a gradient that lies in pieces on many ranks, ‖g‖_p = (Σ_i |g_i|^p)^(1/p), where every entry must be summed
exactly once. Three kinds of pieces meet:

* plain tensors, of which each rank has all there is: nothing to add;
* DTensors, cut over the `Shard` axes of their own mesh: their powers are summed over those axes, and over no other. Any
  mix of meshes and placements may occur (FSDP outside, tensor parallel inside, plain norms between), so the sums are
  kept apart per set of groups; torch's own function refuses such a mix;
* whole parameters that lie on other ranks (pipeline stages), or plain tensors cut by hand: `reduce_over` names the
  groups to sum over, and `counted` which of the parameters this rank answers for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

Groups = tuple[dist.ProcessGroup, ...]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    reduce_over: Sequence[dist.ProcessGroup] = (),
    counted: Callable[[Tensor], bool] | None = None,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place so that the norm of the whole gradient is at most `max_norm`.

    All ranks of the groups concerned must call it, with their DTensors in the same order; also ranks without any
    gradient. Gradients must be averaged already: axes that hold the same average (replicate, ring, ulysses) are not
    summed over. A parameter given twice counts once.

    Args:
        parameters: Parameters, or one. Those without gradient are left out.
        max_norm: Bound; the factor is max_norm / (norm + 1e-6), at most 1, as in torch.
        norm_type: p > 0, or inf for the largest magnitude.
        reduce_over: Groups whose ranks hold *different* parameters, or different pieces of plain ones (pipeline).
        counted: Where a parameter lies on several ranks of `reduce_over` (tied embeddings on the first and last stage),
            true on one of them. It is scaled everywhere. None counts all.
        error_if_nonfinite: Raise where the norm is NaN or infinite, before anything is scaled.
        foreach: Use multi-tensor kernels; None uses them on CPU and CUDA.

    Returns:
        The norm before clipping, the same on all ranks, shape (), at least fp32.

    Raises:
        ValueError: If `max_norm` or `norm_type` is out of range, or a gradient is sparse or complex.
        RuntimeError: If the norm is not finite and `error_if_nonfinite`.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm} must be a number >= 0: the largest norm to let through")
    params = _unique(parameters)
    total = total_norm(params, norm_type, reduce_over=reduce_over, counted=counted, foreach=foreach)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradient is {total.item()}, so it cannot be clipped. To scale by it "
            "all the same, set error_if_nonfinite=False"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for (device, _), grads in _by_kind([_local(grad) for grad in _grads(params)]).items():
        scale = factor.to(device)
        if _use_foreach(foreach, device):
            torch._foreach_mul_(grads, scale)
        else:
            for grad in grads:
                grad.mul_(scale)
    return total


@torch.no_grad()
def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float, *, foreach: bool | None = None) -> None:
    """Clamp every gradient entry, in place, to [-clip_value, clip_value]. Needs no communication.

    Raises:
        ValueError: If the bound is negative, or a DTensor's gradient is a partial sum: its entries are not yet known.
    """
    if not clip_value >= 0:
        raise ValueError(f"clip_value={clip_value} must be a number >= 0: the largest magnitude to let through")
    grads = _grads(_unique(parameters))
    for grad in grads:
        if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
            raise ValueError(f"a gradient with placements {grad.placements} is not summed yet: redistribute it first")
    for (device, _), local in _by_kind([_local(grad) for grad in grads]).items():
        if _use_foreach(foreach, device):
            torch._foreach_clamp_min_(local, -clip_value)
            torch._foreach_clamp_max_(local, clip_value)
        else:
            for grad in local:
                grad.clamp_(-clip_value, clip_value)


@torch.no_grad()
def total_norm(
    parameters: Iterable[Tensor],
    norm_type: float = 2.0,
    *,
    reduce_over: Sequence[dist.ProcessGroup] = (),
    counted: Callable[[Tensor], bool] | None = None,
    foreach: bool | None = None,
) -> Tensor:
    """Norm of the whole gradient, as in `clip_grad_norm_`, without clipping.

    Raises:
        ValueError: If `norm_type` is not positive, or a gradient is sparse or complex.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} must be positive, or math.inf for the largest magnitude")
    params = _unique(parameters)
    _grads(params)
    device = _scalar_device(params, reduce_over)
    pieces: dict[Groups, list[Tensor]] = defaultdict(list)
    for param in params:
        if param.grad is None:
            continue
        local, groups = _owned(param.grad)
        pieces.setdefault(groups, [])
        if counted is None or counted(param):
            pieces[groups].append(local)
    power = torch.zeros((), dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)
    for groups, locals_ in pieces.items():
        part = _sum_of_powers(locals_, norm_type, power, foreach)
        for group in groups:
            part = _reduce(part, norm_type, group)
        power = _merge(power, part, norm_type)
    for group in reduce_over:
        power = _reduce(power, norm_type, group)
    total = power if math.isinf(norm_type) else power.pow(1.0 / norm_type)
    dtype = torch.float32
    for param in params:
        dtype = torch.promote_types(dtype, param.dtype)
    return total.to(dtype)


def _sum_of_powers(grads: Sequence[Tensor], p: float, like: Tensor, foreach: bool | None) -> Tensor:
    """Σ|g|^p over local tensors, or max|g| for p = inf, as a scalar of the dtype and on the device of `like`."""
    power = torch.zeros_like(like)
    for (device, dtype), kind in _by_kind([grad for grad in grads if grad.numel()]).items():
        wide = torch.promote_types(dtype, torch.float32)
        if _use_foreach(foreach, device):
            norms = list(torch._foreach_norm(kind, p, dtype=wide))
        else:
            norms = [torch.linalg.vector_norm(grad, p, dtype=wide) for grad in kind]
        stacked = torch.stack(norms).to(like)
        power = _merge(power, stacked.max() if math.isinf(p) else stacked.pow(p).sum(), p)
    return power


def _merge(one: Tensor, other: Tensor, p: float) -> Tensor:
    """Put two partial results together; NaN wins."""
    return torch.maximum(one, other) if math.isinf(p) else one + other


def _reduce(power: Tensor, p: float, group: dist.ProcessGroup) -> Tensor:
    """Put the partial results of a group's ranks together.

    A maximum may lose a NaN on the way (comparisons with it are false), so it travels as a flag of its own.
    """
    if not math.isinf(p):
        dist.all_reduce(power, op=dist.ReduceOp.SUM, group=group)
        return power
    pair = torch.stack([power.nan_to_num(nan=0.0, posinf=math.inf), power.isnan().to(power.dtype)])
    dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=group)
    return torch.where(pair[1] > 0, torch.full_like(power, math.nan), pair[0])


def _owned(grad: Tensor) -> tuple[Tensor, Groups]:
    """The local piece of a gradient, and the groups over which the pieces add up to the whole.

    A partial sum (a DTensor not reduced yet) has no norm of its own, so it is summed first.
    """
    if not isinstance(grad, DTensor):
        return grad, ()
    placements = [Replicate() if placement.is_partial() else placement for placement in grad.placements]
    if any(placement.is_partial() for placement in grad.placements):
        grad = grad.redistribute(placements=placements)
    mesh = grad.device_mesh
    cut = [axis for axis, placement in enumerate(placements) if not placement.is_replicate() and mesh.size(axis) > 1]
    return _local(grad), tuple(mesh.get_group(axis) for axis in cut)


def _local(grad: Tensor) -> Tensor:
    """This rank's piece, sharing memory."""
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    assert isinstance(local, Tensor)
    return local


def _unique(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Parameters in the order given, each once."""
    if isinstance(parameters, Tensor):
        return [parameters]
    return list({id(param): param for param in parameters}.values())


def _grads(params: Sequence[Tensor]) -> list[Tensor]:
    """Gradients there are."""
    grads = [param.grad for param in params if param.grad is not None]
    for grad in grads:
        if grad.layout != torch.strided or grad.is_complex():
            raise ValueError(
                f"a gradient of layout {grad.layout} and dtype {grad.dtype} cannot be clipped: use dense real "
                "parameters (nn.Embedding(sparse=False), view_as_real)"
            )
    return grads


def _by_kind(grads: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Plain tensors by device and dtype, as multi-tensor kernels want them."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for grad in grads:
        kinds[grad.device, grad.dtype].append(grad)
    return kinds


def _use_foreach(foreach: bool | None, device: torch.device) -> bool:
    return device.type in ("cpu", "cuda") if foreach is None else foreach


def _scalar_device(params: Sequence[Tensor], groups: Sequence[dist.ProcessGroup]) -> torch.device:
    """Where to reduce: a rank without parameters must take part too, on a device that its group can send from."""
    if params:
        return params[0].device
    if any(dist.get_backend(group) == "nccl" for group in groups):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
