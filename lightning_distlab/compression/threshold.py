"""Threshold quantisation (Strom, Interspeech 2015): one quantum for whatever has grown to the threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_distlab.compression import checks
from lightning_distlab.compression.averaging import dense_average
from lightning_distlab.compression.base import Compression, Compressor, Param, State, Step
from lightning_distlab.compression.exclusion import Exclusion
from lightning_distlab.compression.selection import SCRATCH_BYTES, above
from lightning_distlab.payloads import Op, QuantaPayload, Reply, Request, RoundSpec, accumulation_dtype


class Threshold(Compressor):
    """Each rank sends the sign of every element whose accumulated gradient reaches τ, and keeps the rest.

    With local gradient g and residual e, element by element:

        r ← e + g
        q = +τ where r >= τ,  -τ where r < -τ,  0 elsewhere
        e ← r - q
        G = (1/N) Σ q

    At most one quantum an element and step, so e may exceed τ and is worked off in later steps. How much travels
    follows from the gradient: nothing while it is small, one sign and one index for each element that has grown. Sums
    of quanta are small integers and are merged as such.

    τ is in units of the gradient and has to be tuned to the task: too small, and each element sends a sign at almost
    every step and can move by no more than τ; too large, and updates come late and in jumps.

    Momentum and weight decay stay in the optimizer. Memory: e, as large as the parameters, in fp32 for half precision.
    State keys: `residual`; `rounding` for what a lossy wire takes from an excluded tensor (allocated when needed).

    Args:
        threshold: τ.
        exclude_vectors: Average tensors of dimension 0 and 1 (biases, normalisation) densely.
        min_numel: The same for tensors with fewer elements.
        exclude: The same for parameters whose name matches one of these shell patterns.

    Raises:
        ValueError: An option is outside its range.
    """

    name: ClassVar[str] = "threshold"
    rounds = (RoundSpec(Op.SUM, QuantaPayload),)

    def __init__(
        self,
        *,
        threshold: float = 0.001,
        exclude_vectors: bool = True,
        min_numel: int = 256,
        exclude: Sequence[str] = (),
    ) -> None:
        self.threshold = checks.positive("threshold", threshold)
        self.exclusion = Exclusion(
            checks.switch("exclude_vectors", exclude_vectors),
            checks.natural("min_numel", min_numel),
            checks.patterns("exclude", exclude),
        )

    @override
    def init_state(self, param: Param) -> State:
        if self.exclusion.reason(param) is not None:
            return {}
        dtype = accumulation_dtype(param.weight.dtype)
        return {"residual": torch.zeros(param.weight.numel(), dtype=dtype, device=param.weight.device)}

    @override
    def exchange(self, grad: Tensor, state: State, param: Param, step: Step) -> Compression:
        if self.exclusion.reason(param) is not None:
            yield from dense_average(grad, grad, state, step.world_size, keep_error=True)
            return
        residual, numel = state["residual"], grad.numel()
        # Another tensor's compressor takes the same scratch once this one waits: nothing in it outlives the request.
        pending = torch.add(residual, grad, out=step.scratch.take(residual, purpose="candidate"))
        indices = above(pending, self.threshold, scratch=step.scratch.raw(SCRATCH_BYTES))
        values = pending[indices]
        on_the_edge = values == -self.threshold  # the lower side is open
        if on_the_edge.any():
            indices, values = indices[~on_the_edge], values[~on_the_edge]
        signs = values.sign().to(torch.float32)
        reply: Reply = yield Request(Op.SUM, QuantaPayload(indices, signs, numel, numel), final=True)

        residual.add_(grad)
        residual.index_add_(0, indices, signs.to(residual.dtype), alpha=-self.threshold)
        if isinstance(reply.returned, QuantaPayload):  # entries that lost
            back = reply.returned.values.to(residual.dtype)
            residual.index_add_(0, reply.returned.indices, back, alpha=self.threshold)
        total = reply.payload
        assert isinstance(total, QuantaPayload)
        grad.zero_()
        moves = total.values.to(residual.dtype) * (self.threshold / step.world_size)
        grad.index_copy_(0, total.indices, moves.to(grad.dtype))

    @override
    def describe(self, params: Mapping[str, Param]) -> str:
        return f"threshold: quantum {self.threshold:g}; {self.exclusion.describe(params)}"
