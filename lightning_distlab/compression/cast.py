"""Gradients in half precision: the plain baseline of every other compressor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_distlab.compression import checks
from lightning_distlab.compression.base import Compression, Compressor, Param, State, Step
from lightning_distlab.payloads import DensePayload, Op, Reply, Request, RoundSpec, accumulation_dtype

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Cast(Compressor):
    """Each rank sends its gradient rounded to bf16 or fp16; what that takes away is lost.

    fp16 is cut off at 65504 and divided by the number of ranks before it is sent, since a backend that adds in fp16
    overflows there. Over `native` the backend adds in half
    precision too; over our own collectives sums are fp32, and travel as such.

    State keys: none.

    Args:
        dtype: `bf16` or `fp16`.

    Raises:
        ValueError: Another dtype.
    """

    name: ClassVar[str] = "cast"
    rounds = (RoundSpec(Op.SUM, DensePayload),)
    fuses: ClassVar[bool] = True

    def __init__(self, *, dtype: str = "bf16") -> None:
        self.dtype = checks.choice("dtype", dtype, tuple(DTYPES))

    @override
    def exchange(self, grad: Tensor, state: State, param: Param, step: Step) -> Compression:
        dtype = DTYPES[self.dtype]
        early = step.world_size if self.dtype == "fp16" else 1
        largest = torch.finfo(dtype).max
        wide = grad.to(accumulation_dtype(grad.dtype)).clamp(-largest, largest).div_(early)
        half = wide.to(dtype)
        if not bool(grad.isfinite().all()):  # over a backend without headers the sum has to tell everybody
            half.fill_(torch.nan)
        reply: Reply = yield Request(Op.SUM, DensePayload(half), final=True)
        assert isinstance(reply.payload, DensePayload)
        torch.div(reply.payload.values.to(wide.dtype), step.world_size // early, out=wide)
        grad.copy_(wide)

    @override
    def describe(self, params: Mapping[str, Param]) -> str:
        return f"cast: {len(params)} tensors as {self.dtype}"
