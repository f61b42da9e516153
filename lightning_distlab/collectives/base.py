"""How the ranks of a group combine their payloads: the contract of every exchange algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

from lightning_distlab.payloads import Op, Payload, RoundSpec


@dataclass(frozen=True)
class Receive:
    """A message that a rank waits for.

    Attributes:
        peer: Rank that sends it.
        like: A payload of the same structure, the template for decoding.
        capacity: Bytes it has at most, encoded. All ranks compute the same number.
    """

    peer: int
    like: Payload
    capacity: int


@dataclass(frozen=True)
class Round:
    """One step of an exchange: all sends and receives of a rank that may be under way at the same time.

    The driver answers with the received payloads, in the order of `receives`.
    """

    sends: tuple[tuple[int, Payload], ...] = ()
    receives: tuple[Receive, ...] = ()


@dataclass(frozen=True)
class NativeRound:
    """One collective of the backend itself, on a dense payload; the driver answers with [the result].

    The result may lie in the storage of `payload`, which the backend reduces in place.
    """

    op: Op
    payload: Payload


Exchange = Generator[Round | NativeRound, list[Payload], Payload]
"""A running exchange on one rank. It returns the result of the operation."""


class Collective(ABC):
    """An exchange algorithm, as a generator of rounds; it knows no processes and no compressor.

    Attributes:
        name: The word that selects it.
        ops: Operations it can perform.
        carries_headers: Messages are ours, with flags in their headers. False where the backend reduces bare tensors.
    """

    name: ClassVar[str]
    ops: ClassVar[frozenset[Op]]
    carries_headers: ClassVar[bool] = True

    @abstractmethod
    def run(self, op: Op, payload: Payload, rank: int, world_size: int) -> Exchange:
        """Exchange `payload`; every rank runs this with its own.

        Args:
            op: One of `ops`. For `Op.ALL_GATHER` the payload is this rank's index range, else the whole.
            payload: This rank's contribution.
            rank: This rank, in [0, world_size).
            world_size: Number of ranks, at least 1.

        Returns:
            The result; for `Op.SCATTER_SUM` this rank's index range of it.
        """

    def gather(self, payload: Payload, rank: int, world_size: int) -> Generator[Round, list[Payload], list[Payload]]:
        """Exchange whole payloads, for `Op.GATHER`: all of them, in rank order."""
        raise AssertionError(f"{self.name} does not perform GATHER; `supports` says so")

    def supports(self, spec: RoundSpec) -> str | None:
        """Why this algorithm cannot carry such a round, or None when it can."""
        if spec.op not in self.ops:
            return f"{self.name} cannot perform {spec.op.name}"
        if spec.op is Op.SUM and not spec.traits.mergeable:
            return f"{self.name} merges partial sums, and {spec.payload.__name__} cannot be merged without loss"
        return None

    @abstractmethod
    def steps(self, world_size: int) -> int:
        """Rounds, one after the other, of one `Op.SUM`."""

    @abstractmethod
    def sum_bytes(
        self, world_size: int, elements: int, density: float, entry_bytes: float, dense_bytes: float
    ) -> float:
        """Bytes that a rank sends for one `Op.SUM` (headers apart), by formula; the rank that sends most.

        Args:
            world_size: Number of ranks.
            elements: Elements of the vector.
            density: Share of the elements that each rank sends, 1 for dense payloads; supports are taken as disjoint
                until their union is full.
            entry_bytes: Bytes of one sparse entry.
            dense_bytes: Bytes of one dense element.
        """


def check_pair(rounds: tuple[RoundSpec, ...], compressor: str, collective: Collective, legal: list[str]) -> None:
    """Refuse a compressor whose rounds a collective cannot carry.

    Args:
        rounds: The compressor's static rounds.
        compressor: Its name, for the message.
        collective: The algorithm asked for.
        legal: Names of the collectives that can carry these rounds, for the message.

    Raises:
        ValueError: With the reason and the legal alternatives.
    """
    for spec in rounds:
        reason = collective.supports(spec)
        if reason is not None:
            raise ValueError(
                f"compressor={compressor!r} cannot run over collective={collective.name!r}: {reason}. "
                f"Use one of {', '.join(legal)}."
            )
