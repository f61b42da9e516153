"""QSGD (Alistarh et al., NeurIPS 2017), in the form of a few fixed bits an element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_distlab.compression import checks
from lightning_distlab.compression.averaging import dense_average
from lightning_distlab.compression.base import Compression, Compressor, Param, State, Step
from lightning_distlab.compression.exclusion import Exclusion
from lightning_distlab.compression.stochastic import exchange_levels
from lightning_distlab.payloads import DensePayload, LevelPayload, Op, RoundSpec


class QSGD(Compressor):
    """Random rounding to 2^bits - 1 evenly spaced levels, block by block, right on average.

    With L = 2^(bits - 1) - 1 and local gradient g, for each block of a tensor:

        s = max over ranks of max |g|
        level_i = L g_i / s, rounded up or down at random, right on average
        G = (1/N) Σ level s / L

    E[level] = L g / s, so there is no memory. The paper scales by the 2-norm and codes the many small levels that
    this gives with variable length; as in its own experiments with fixed bits, the scale here is the maximum, which
    uses all levels, and it is shared by the ranks, so that sums are integers and travel exactly, in a few bits more.

    Momentum and weight decay stay in the optimizer. State keys: none, but for `rounding`, for what a lossy wire takes
    from an excluded tensor (allocated when needed).

    Args:
        bits: Of an element of a rank's own message, 2 to 8.
        block: Elements that share a scale.
        exclude_vectors: Average tensors of dimension 0 and 1 (biases, normalisation) densely.
        min_numel: The same for tensors with fewer elements.
        exclude: The same for parameters whose name matches one of these shell patterns.

    Raises:
        ValueError: An option is outside its range.
    """

    name: ClassVar[str] = "qsgd"
    rounds = (RoundSpec(Op.MAX, DensePayload), RoundSpec(Op.SUM, LevelPayload))
    draws_by_step: ClassVar[bool] = True

    def __init__(
        self,
        *,
        bits: int = 8,
        block: int = 8192,
        exclude_vectors: bool = True,
        min_numel: int = 256,
        exclude: Sequence[str] = (),
    ) -> None:
        self.bits = checks.integer_between("bits", bits, 2, 8)
        self.block = checks.positive_integer("block", block)
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
        bound = 2 ** (self.bits - 1) - 1
        yield from exchange_levels(grad, param, step, bound=bound, block=self.block, limit=None, code="bits")

    @override
    def describe(self, params: Mapping[str, Param]) -> str:
        return f"qsgd: {self.bits} bits, a scale for {self.block} elements; {self.exclusion.describe(params)}"
