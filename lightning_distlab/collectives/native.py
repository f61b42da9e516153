"""The backend's own collective."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from lightning_distlab.collectives.base import Collective, Exchange, NativeRound
from lightning_distlab.payloads import Bundle, DensePayload, Op, Payload, RoundSpec


class Native(Collective):
    """Leave the whole operation to gloo or NCCL, one all-reduce for each dense vector.

    Both run a ring over W equal chunks: 2 (W - 1) steps, 2 M (W - 1) / W bytes per rank. The backend adds bare
    tensors, so no header travels and only payloads that are vectors of a fixed size can be carried; they are added in
    the dtype of the tensor.
    """

    name: ClassVar[str] = "native"
    ops: ClassVar[frozenset[Op]] = frozenset({Op.SUM, Op.MAX})
    carries_headers: ClassVar[bool] = False

    @override
    def run(self, op: Op, payload: Payload, rank: int, world_size: int) -> Exchange:
        if world_size == 1:
            return payload
        if not isinstance(payload, Bundle):
            (result,) = yield NativeRound(op, payload)
            return result
        parts = []
        for part in payload.parts:
            (result,) = yield NativeRound(op, part)
            parts.append(result)
        return Bundle(tuple(parts), payload.flags, payload.present, payload.tensors)

    @override
    def supports(self, spec: RoundSpec) -> str | None:
        reason = super().supports(spec)
        if reason is None and not issubclass(spec.payload, DensePayload):
            return f"{self.name} adds dense tensors of a fixed size, and {spec.payload.__name__} is none"
        return reason

    @override
    def steps(self, world_size: int) -> int:
        return 2 * (world_size - 1)

    @override
    def sum_bytes(
        self,
        world_size: int,
        elements: int,
        density: float,
        entry_bytes: float,
        dense_bytes: float,
        *,
        rank: int | None = None,
    ) -> float:
        return 2 * elements * dense_bytes * (world_size - 1) / world_size
