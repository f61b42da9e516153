"""What a compressor may ask of the ranks, and how it says so before any payload exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from lightning_distlab.payloads.base import Payload, Traits


class Op(Enum):
    """What is to be done with the payloads that all ranks yield in one round."""

    SUM = "sum"
    """Every rank receives the sum over ranks."""
    MAX = "max"
    """Every rank receives the elementwise maximum (dense payloads only)."""
    GATHER = "gather"
    """Every rank receives all payloads, in rank order."""
    SCATTER_SUM = "scatter_sum"
    """Rank r receives the sum over ranks of index range r (its own part; `even_bounds` cuts)."""
    ALL_GATHER = "all_gather"
    """Rank r contributes index range r; every rank receives the ranges laid together."""


def _all_entries(n: int) -> int:
    # a function of the module, not a lambda: strategies travel to spawned ranks by pickle
    return n


@dataclass(frozen=True)
class RoundSpec:
    """One round of a compressor, known statically, on which pairs with a collective are checked.

    Attributes:
        op: The operation asked for.
        payload: The class of what is yielded.
        capacity: Entries that one rank sends at most for a tensor of `n` elements.
    """

    op: Op
    payload: type[Payload]
    capacity: Callable[[int], int] = _all_entries

    @property
    def traits(self) -> Traits:
        """Traits of the payload class."""
        return self.payload.traits


@dataclass(frozen=True)
class Request:
    """What a compressor yields: a payload, and what is to be done with it.

    Attributes:
        op: The operation.
        payload: This rank's contribution, before rounding to the wire's precision.
        final: No further request follows. The compressor is resumed after a final request only when the step is known
            to be finite on all ranks, so that code behind it may change state; code before it may not.
    """

    op: Op
    payload: Payload
    final: bool = False


@dataclass(frozen=True)
class Reply:
    """What a compressor is sent back.

    Attributes:
        payload: The result of the operation. For `Op.GATHER` the payload of rank 0; see `payloads`.
        returned: The part of this rank's contribution that did not enter the result and goes back to the residual:
            rounding errors of the wire and entries that lost. None when everything got through.
        payloads: For `Op.GATHER`, all payloads in rank order.
    """

    payload: Payload
    returned: Payload | None = None
    payloads: tuple[Payload, ...] = ()
