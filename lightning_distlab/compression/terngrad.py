"""TernGrad (Wen et al., NeurIPS 2017): three levels, right on average."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_distlab.compression import checks
from lightning_distlab.compression.averaging import dense_average
from lightning_distlab.compression.base import Compression, Compressor, Param, State, Step
from lightning_distlab.compression.exclusion import Exclusion
from lightning_distlab.compression.stochastic import exchange_levels
from lightning_distlab.payloads import DensePayload, LevelPayload, Op, RoundSpec, accumulation_dtype

CODES = ("two_bit", "base3")


class TernGrad(Compressor):
    """Each element travels as -1, 0 or 1 times a scale that all ranks share, drawn so that its mean is the gradient.

    With local gradient g of one tensor:

        g ← min(max(g, -c σ), c σ)                 gradient clipping    (section 3.3; c = 2.5)
        s = max over ranks of max |g|              scaler sharing       (section 3.3)
        q_i = s sign(g_i) b_i,  b_i ~ Bernoulli(|g_i| / s)              (equation 1)
        G = (1/N) Σ q

    E[q] = g after clipping, so nothing is kept for later: there is no state, and nothing to save. With a shared scale
    the sum is an integer multiple of it between -N and N, which travels in log2(2 N + 1) bits.

    σ is the root mean square of the tensor: gradients are taken to have mean zero, and then a tensor whose elements
    are all alike is not clipped away. Clipping biases the gradient a little, and reduces its variance a lot.

    Momentum and weight decay stay in the optimizer. State keys: none, but for `rounding`, for what a lossy wire takes
    from an excluded tensor (allocated when needed).

    Args:
        clip: c, or None for no clipping.
        code: `two_bit`: four levels in a byte. `base3`: five (1.6 bits each), at a little more codec time.
        exclude_vectors: Average tensors of dimension 0 and 1 (biases, normalisation) densely.
        min_numel: The same for tensors with fewer elements.
        exclude: The same for parameters whose name matches one of these shell patterns (the paper leaves out the last
            layer of AlexNet).

    Raises:
        ValueError: An option is outside its range.
    """

    name: ClassVar[str] = "terngrad"
    rounds = (RoundSpec(Op.MAX, DensePayload), RoundSpec(Op.SUM, LevelPayload))
    draws_by_step: ClassVar[bool] = True

    def __init__(
        self,
        *,
        clip: float | None = 2.5,
        code: str = "two_bit",
        exclude_vectors: bool = True,
        min_numel: int = 256,
        exclude: Sequence[str] = (),
    ) -> None:
        self.clip = checks.positive_or_none("clip", clip)
        self.code = checks.choice("code", code, CODES)
        self.exclusion = Exclusion(
            checks.switch("exclude_vectors", exclude_vectors),
            checks.natural("min_numel", min_numel),
            checks.patterns("exclude", exclude),
        )

    @override
    def exchange(self, grad: Tensor, state: State, param: Param, step: Step) -> Compression:
        if self.exclusion.reason(param) is not None:
            yield from dense_average(grad, grad, state, step.world_size, keep_error=True)
            return
        limit = None
        if self.clip is not None:
            norm = float(torch.linalg.vector_norm(grad, dtype=accumulation_dtype(grad.dtype)))
            if 0.0 < norm < math.inf:  # squares may leave the range of fp32 where the elements do not
                limit = self.clip * norm / math.sqrt(grad.numel())
        code = "bits" if self.code == "two_bit" else "base3"
        yield from exchange_levels(grad, param, step, bound=1, block=grad.numel(), limit=limit, code=code)

    @override
    def describe(self, params: Mapping[str, Param]) -> str:
        clip = "no clipping" if self.clip is None else f"clipped at {self.clip:g} sigma"
        return f"terngrad: {self.code}, {clip}; {self.exclusion.describe(params)}"
