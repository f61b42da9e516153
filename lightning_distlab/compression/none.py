"""Nothing compressed."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_distlab.compression.averaging import dense_average
from lightning_distlab.compression.base import Compression, Compressor, Param, State, Step
from lightning_distlab.payloads import DensePayload, Op, RoundSpec


class NoCompression(Compressor):
    """The plain average of the gradients, as in data-parallel training without compression.

    It keeps no state. On a wire whose dense codec is lossy the rounding error of each step is therefore dropped, as
    with half-precision all-reduce anywhere; a compressor with a residual keeps it.
    """

    name: ClassVar[str] = "none"
    fuses: ClassVar[bool] = True
    rounds: tuple[RoundSpec, ...] = (RoundSpec(Op.SUM, DensePayload),)

    @override
    def exchange(self, grad: Tensor, state: State, param: Param, step: Step) -> Compression:
        yield from dense_average(grad, grad, state, step.world_size, keep_error=False)
