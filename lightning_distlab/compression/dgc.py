"""Deep Gradient Compression (Lin, Han, Mao, Wang, Dally, ICLR 2018)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_distlab.compression import checks
from lightning_distlab.compression.averaging import dense_average, entries, put_back, write_average
from lightning_distlab.compression.base import Compression, Compressor, Hyper, Param, State, Step
from lightning_distlab.compression.exclusion import Exclusion
from lightning_distlab.compression.selection import SCRATCH_BYTES, top_k
from lightning_distlab.compression.warmup import SparsityWarmup
from lightning_distlab.payloads import DensePayload, Op, Reply, Request, RoundSpec, SparsePayload, accumulation_dtype

CLIP_MODES = ("exact", "tensor", "previous")


class DGC(Compressor):
    """Each rank sends the largest entries of its accumulated *velocity*, and keeps the rest for later steps.

    With local gradient g, momentum factor m, and per-rank memories u (momentum) and v (velocity), all of one tensor:

        g ← g · min(1, c N^(-1/2) / ‖g‖)        local gradient clipping        (section 3.2)
        u ← m u + g                             momentum correction            (equation 4)
        v ← v + u                               Nesterov: v ← v + m u + g
        mask ← the k entries of largest |v|
        send v ⊙ mask;  v ← v ⊙ ¬mask           residual
        u ← u ⊙ ¬mask                           momentum factor masking        (equation 6)
        G = (1/N) Σ sent,   w ← w - η G

    Accumulating velocities instead of gradients is what makes a late entry arrive with the momentum that it would
    have gathered in dense training. Nesterov's form is often written u ← m (u + g), v ← v + u + g; here u is that u
    divided by m, the momentum buffer of `torch.optim.SGD` itself, which stays right when a schedule changes m.

    The compressor owns SGD's momentum and weight decay: the optimizer must apply neither. Weight decay λ never enters
    u and v, where it would be selected and masked like a gradient; it has a momentum of its own, d ← m d + λ w, which
    is the same on all ranks because w is, and is added to the average (Nesterov: λ w + m d). Excluded tensors are
    averaged densely, and the same momentum is applied to the average. With `density=1` and masking off all of this is
    torch's SGD on the averaged gradient.

    When everything is sent (density 1, or a step that is dense because that is cheaper) masking is bypassed: it would
    clear all of u at every step and leave SGD without momentum.

    Where the optimizer keeps its own momentum (Adam; `Hyper.momentum == 0`) this is error feedback: v ← v + g.

    Memory: v and u, and d where there is weight decay; each as large as the parameter, in fp32 for half precision.
    State keys: `velocity`, `momentum`, `decay`; `rounding` for what a lossy wire takes from an excluded tensor
    (allocated when needed); `norm` (one element) for `clip_mode="previous"`.

    Args:
        density: Share of the entries of each tensor that is sent, in (0, 1]. The paper's is 0.001.
        momentum_correction: Own the momentum as above. Off: the optimizer keeps momentum and weight decay and applies
            them after averaging, so v ← v + g.
        momentum_masking: Clear u where v was sent.
        clip_norm: c, the norm to which the whole gradient of a single-rank run would be clipped; None for no clipping.
        clip_mode: Which norm is compared with c N^(-1/2). `exact`: of this rank's whole gradient, which needs all of
            it before the first tensor is sent and so rules out overlap with the backward pass. `tensor`: of each
            tensor by itself. `previous`: of this rank's whole gradient one step ago; the first step is not clipped.
        warmup_epochs: Length of the sparsity warm-up in epochs (the paper: 4 of 164 for CIFAR-10, 4 of 90 for
            ImageNet, 1 for language and speech). 0 by default, since a compressor cannot know how long training is.
        warmup_steps: The same in optimizer steps; only one of the two.
        dense_when_cheaper: Send everything while a density costs more bytes than that on the collective in use.
        exclude_vectors: Average tensors of dimension 0 and 1 (biases, normalisation) densely.
        min_numel: The same for tensors with fewer elements.
        exclude: The same for parameters whose name matches one of these shell patterns.

    Raises:
        ValueError: An option is outside its range, or both warm-ups are given.
    """

    name: ClassVar[str] = "dgc"
    refuses_clipping: str | None = (
        "gradient_clip_val would clip the average of what was released, single entries that carry many steps; "
        "clip the local gradient with the compressor's clip_norm instead"
    )

    def __init__(
        self,
        *,
        density: float = 0.001,
        momentum_correction: bool = True,
        momentum_masking: bool = True,
        clip_norm: float | None = None,
        clip_mode: str = "exact",
        warmup_epochs: float = 0.0,
        warmup_steps: int = 0,
        dense_when_cheaper: bool = True,
        exclude_vectors: bool = True,
        min_numel: int = 256,
        exclude: Sequence[str] = (),
    ) -> None:
        self.density = checks.fraction("density", density)
        self.momentum_correction = checks.switch("momentum_correction", momentum_correction)
        self.momentum_masking = checks.switch("momentum_masking", momentum_masking)
        self.clip_norm = checks.positive_or_none("clip_norm", clip_norm)
        self.clip_mode = checks.choice("clip_mode", clip_mode, CLIP_MODES)
        self.warmup = SparsityWarmup(
            self.density,
            checks.non_negative("warmup_epochs", warmup_epochs),
            checks.natural("warmup_steps", warmup_steps),
        )
        if self.warmup.epochs and self.warmup.steps:
            raise ValueError(
                f"warmup_epochs={warmup_epochs!r} and warmup_steps={warmup_steps!r} both give the length of the "
                "sparsity warm-up; set one of them to 0."
            )
        self.dense_when_cheaper = checks.switch("dense_when_cheaper", dense_when_cheaper)
        self.exclusion = Exclusion(
            checks.switch("exclude_vectors", exclude_vectors),
            checks.natural("min_numel", min_numel),
            checks.patterns("exclude", exclude),
        )
        self.owns_momentum = self.momentum_correction
        self.needs_whole_gradient = self.clip_norm is not None and self.clip_mode == "exact"
        # At density 1 every payload is dense, and a collective that knows nothing else will do.
        self.rounds = (RoundSpec(Op.SUM, DensePayload if self.density == 1.0 else SparsePayload),)

    @override
    def init_state(self, param: Param) -> State:
        keys = [] if self.exclusion.reason(param) else ["velocity"]
        hyper = self._hyper(param)
        if hyper.momentum:
            keys += ["momentum", "decay"] if hyper.weight_decay else ["momentum"]
        state = {key: _zeros(param) for key in keys}
        if self._clips("previous"):
            state["norm"] = torch.zeros(1, dtype=accumulation_dtype(param.weight.dtype), device=param.weight.device)
        return state

    @override
    def observe(self, gradients: Mapping[str, Tensor], states: Mapping[str, State], step: Step) -> float | None:
        """The factor of local clipping for this step, from the gradients or from the norms of the step before."""
        if self._clips("exact"):
            norms = [_norm(grad) for grad in gradients.values()]
        elif self._clips("previous"):
            norms = [state["norm"] for state in states.values()]
        else:
            return None
        return self._clip_scale(math.hypot(*(float(norm) for norm in norms)), step)

    @override
    def exchange(self, grad: Tensor, state: State, param: Param, step: Step) -> Compression:
        hyper = self._hyper(param)
        scale = self._scale(grad, step)
        norm = _norm(grad) if self._clips("previous") else None
        if self.exclusion.reason(param) is not None:
            clipped = grad if scale == 1.0 else grad * scale
            yield from dense_average(grad, clipped, state, step.world_size, keep_error=True)
            _apply_momentum(grad, state, hyper, param)
        else:
            yield from self._exchange_velocity(grad, scale, state, param, step)
        # The final request lies behind: from here on state may change.
        if norm is not None:
            state["norm"].copy_(norm)
        _apply_weight_decay(grad, state, hyper, param)

    def _exchange_velocity(self, grad: Tensor, scale: float, state: State, param: Param, step: Step) -> Compression:
        """Send the largest entries of v, or all of them; afterwards `grad` holds their average."""
        hyper = self._hyper(param)
        velocity = state["velocity"]
        momentum = state.get("momentum")
        if momentum is None and hyper.momentum:  # a schedule has raised it from 0 since the state was made
            momentum = _zeros(param)
        density = self.density_at(step)
        count = entries(density, grad.numel())
        everything = count == grad.numel() or (self.dense_when_cheaper and step.dense_is_cheaper(density))

        # Another tensor's compressor takes the same scratch once this one waits: nothing in it outlives the request.
        scratch = step.scratch.take(velocity, purpose="candidate")
        candidate = _accumulate(grad, scale, hyper, (momentum, velocity), out=(scratch, scratch, scratch))
        payload: SparsePayload | None = None
        reply: Reply
        if everything:
            # No name for what is sent: while it travels, this generator must not keep a second copy alive.
            reply = yield Request(Op.SUM, DensePayload(candidate.clone()), final=True)
        else:
            indices = top_k(candidate, count, scratch=step.scratch.raw(SCRATCH_BYTES), seed=step.index)
            payload = SparsePayload(indices, candidate[indices], grad.numel(), count)
            reply = yield Request(Op.SUM, payload, final=True)

        if momentum is not None:
            state["momentum"] = momentum
        scratch = step.scratch.take(velocity, purpose="candidate")
        kept = velocity if momentum is None else momentum
        _accumulate(grad, scale, hyper, (momentum, velocity), out=(kept, scratch, velocity))
        if payload is None:
            velocity.zero_()
        else:
            velocity[payload.indices] = 0.0
        put_back(reply.returned, velocity)
        if self.momentum_masking and momentum is not None and payload is not None:
            momentum[_passed(payload, reply, velocity)] = 0.0
        write_average(reply.payload, grad, step.world_size)

    def density_at(self, step: Step) -> float:
        """Share of the entries that is selected in a step."""
        return self.warmup.at(step.index, step.epoch)

    def _hyper(self, param: Param) -> Hyper:
        """What of the optimizer's settings acts in here: nothing unless momentum is corrected."""
        return param.hyper if self.momentum_correction else Hyper()

    def _clips(self, mode: str) -> bool:
        return self.clip_norm is not None and self.clip_mode == mode

    def _scale(self, grad: Tensor, step: Step) -> float:
        """The factor of local clipping for one tensor."""
        if self.clip_norm is None:
            return 1.0
        if self.clip_mode == "tensor":
            return self._clip_scale(float(_norm(grad)), step)
        assert isinstance(step.observed, float), "observe must run before the first tensor of a step is compressed"
        return step.observed

    def _clip_scale(self, norm: float, step: Step) -> float:
        """min(1, c N^(-1/2) / norm): N independent gradients of that norm have a sum, over N, of 1/√N of it.

        A norm that is not finite clips nothing: that step is skipped anyway.
        """
        assert self.clip_norm is not None
        limit = self.clip_norm / math.sqrt(step.world_size)
        return limit / norm if math.isfinite(norm) and norm > limit else 1.0

    @override
    def describe(self, params: Mapping[str, Param]) -> str:
        masking = "on" if self.momentum_masking and self.momentum_correction else "off"
        clipping = "off" if self.clip_norm is None else f"{self.clip_mode} at {self.clip_norm:g} / sqrt(ranks)"
        return (
            f"dgc: density {self.density:g}; {self.exclusion.describe(params)}; momentum correction "
            f"{'on' if self.momentum_correction else 'off'}, masking {masking}, local clipping {clipping}, "
            f"{self.warmup.describe()}, dense where cheaper {'on' if self.dense_when_cheaper else 'off'}"
        )


def _zeros(param: Param) -> Tensor:
    """A memory as large as the parameter, [numel]; half precision accumulates in fp32."""
    return torch.zeros(param.weight.numel(), dtype=accumulation_dtype(param.weight.dtype), device=param.weight.device)


def _norm(grad: Tensor) -> Tensor:
    """Euclidean norm, 0-D."""
    norm: Tensor = torch.linalg.vector_norm(grad, dtype=accumulation_dtype(grad.dtype))
    return norm


def _accumulate(
    grad: Tensor,
    scale: float,
    hyper: Hyper,
    memory: tuple[Tensor | None, Tensor],
    out: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """U ← m u + g and v ← v + u (Nesterov: v ← v + m u + g), for both the candidate and the commit.

    One expression for both, so that the committed v has the bits of the candidate that was cut. u and v are not
    touched unless they are named in `out`.

    Args:
        grad: g before clipping, 1-D.
        scale: Factor of local clipping.
        hyper: Momentum factor m and its form.
        memory: u (None without momentum) and v.
        out: Where the new u, Nesterov's step and the new v go; they may be one tensor, since each is read for the
            last time when the next is written.

    Returns:
        The new v.
    """
    (u, v), (u_out, step_out, v_out) = memory, out
    if u is None or hyper.momentum == 0.0:
        return torch.add(v, grad, alpha=scale, out=v_out)
    step = torch.mul(u, hyper.momentum, out=u_out).add_(grad, alpha=scale)
    if hyper.nesterov:
        step = torch.mul(u_out, hyper.momentum, out=step_out).add_(grad, alpha=scale)
    return torch.add(v, step, out=v_out)


def _passed(payload: SparsePayload, reply: Reply, velocity: Tensor) -> Tensor:
    """Indices whose value, or part of it, was sent and not returned whole: there the momentum has been released."""
    if reply.returned is None:
        return payload.indices
    lost = velocity[payload.indices] == payload.values  # a loser, or a value that the wire rounds to zero
    return payload.indices[~lost]


def _apply_momentum(average: Tensor, state: State, hyper: Hyper, param: Param) -> None:
    """Momentum of an excluded tensor, applied to its average, in place: u ← m u + G; G ← u (Nesterov: G + m u)."""
    if hyper.momentum == 0.0:
        return
    if "momentum" not in state:
        state["momentum"] = _zeros(param)
    u = state["momentum"]
    u.mul_(hyper.momentum).add_(average)
    if hyper.nesterov:
        average.add_(u, alpha=hyper.momentum)
    else:
        average.copy_(u)


def _apply_weight_decay(average: Tensor, state: State, hyper: Hyper, param: Param) -> None:
    """Coupled weight decay with a momentum of its own, in place: d ← m d + λ w; G ← G + d (Nesterov: + λ w + m d)."""
    if hyper.weight_decay == 0.0 and "decay" not in state:
        return
    weight = param.flat
    if hyper.momentum == 0.0:
        average.add_(weight, alpha=hyper.weight_decay)
        return
    if "decay" not in state:
        state["decay"] = _zeros(param)
    d = state["decay"].mul_(hyper.momentum).add_(weight, alpha=hyper.weight_decay)
    if hyper.nesterov:
        average.add_(weight, alpha=hyper.weight_decay).add_(d, alpha=hyper.momentum)
    else:
        average.add_(d)
