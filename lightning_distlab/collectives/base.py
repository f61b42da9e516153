"""How the ranks of a group combine their payloads: the contract of every exchange algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import ClassVar, NamedTuple, TypeVar

from lightning_distlab.payloads import DensePayload, Op, Payload, RoundSpec

P = TypeVar("P", bound=Payload)


class Receive(NamedTuple):
    """A message that a rank waits for.

    Attributes:
        peer: Rank that sends it.
        like: What this rank itself would contribute in its place, which tells its shape.
        terms: Contributions that are merged in it.
    """

    peer: int
    like: Payload
    terms: int = 1

    @property
    def template(self) -> Payload:
        """A payload of the message's own structure, for decoding it."""
        return self.like.as_sum(self.terms)

    @property
    def capacity(self) -> int:
        """Bytes that the message has at most, encoded. All ranks compute the same number."""
        return self.like.max_wire_size(self.terms)


class Round(NamedTuple):
    """One step of an exchange: all sends and receives of a rank that may be under way at the same time.

    At most one message goes from one rank to another in a round. All ranks yield the same number of rounds; one with
    nothing to do yields an empty round. The driver answers with the received payloads, in the order of `receives`.
    """

    sends: Sequence[tuple[int, Payload]] = ()
    receives: Sequence[Receive] = ()


class NativeRound(NamedTuple):
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
        cuts: Keeps only some entries of sparse sums. Tensors are then summed apart, so that which of them share a
            bucket, which may change within a run, has no say in what is kept.
        merges_in_transit: Partial sums travel, so payloads must merge without loss. False where everything is added
            once, at its destination.
    """

    name: ClassVar[str]
    ops: ClassVar[frozenset[Op]]
    carries_headers: ClassVar[bool] = True
    merges_in_transit: ClassVar[bool] = True
    cuts: ClassVar[bool] = False

    @abstractmethod
    def run(self, op: Op, payload: Payload, rank: int, world_size: int) -> Exchange:
        """Exchange `payload`; every rank runs this with its own.

        Args:
            op: One of `ops`, but not `Op.GATHER` (see `gather`).
            payload: This rank's contribution, over the whole index space. For `Op.ALL_GATHER` only this rank's index
                range of it counts (`split_evenly(world_size)[rank]`); the rest may hold anything.
            rank: This rank, in [0, world_size).
            world_size: Number of ranks, at least 1.

        Returns:
            The result; for `Op.SCATTER_SUM` this rank's index range of it.
        """

    def reduce(
        self, op: Op, payload: Payload, rank: int, world_size: int
    ) -> Generator[Round | NativeRound, list[Payload], tuple[Payload, tuple[Payload | None, ...] | None]]:
        """What `run` does, and what of this rank's contribution did not get into the result, part by part.

        Nothing is left out unless an algorithm says so.
        """
        return (yield from self.run(op, payload, rank, world_size)), None

    def gather(self, payload: Payload, rank: int, world_size: int) -> Generator[Round, list[Payload], list[Payload]]:
        """Exchange whole payloads, for `Op.GATHER`: all of them, in rank order."""
        raise AssertionError(f"{self.name} does not perform GATHER; `supports` says so")

    delay: int = 0
    """Steps after which an average is used: what arrives in step t is applied in step t + delay."""
    ranks_per_node: int = 1
    """Ranks that average densely with each other before anything is compressed; see `within`."""

    def check_world(self, world_size: int) -> None:  # noqa: B027  (most take any number)
        """Refuse a number of ranks.

        Raises:
            ValueError: It does not fit the algorithm's options.
        """

    def contributor(self, rank: int, world_size: int) -> tuple[int, int]:
        """Which contribution a rank makes, and how many are averaged: its rank and their number, to a compressor."""
        return rank, world_size

    def within(self, payload: Payload, rank: int, world_size: int) -> Exchange:
        """The sum over the ranks of this rank's node, where `ranks_per_node` is above 1."""
        raise AssertionError(f"{self.name} has no nodes")

    def supports(self, spec: RoundSpec) -> str | None:
        """Why this algorithm cannot carry such a round, or None when it can."""
        if spec.op not in self.ops:
            return f"{self.name} cannot perform {spec.op.name}"
        if spec.op is Op.MAX and not issubclass(spec.payload, DensePayload):
            return f"a maximum is taken of dense payloads only, not of {spec.payload.__name__}"
        sums = spec.op in (Op.SUM, Op.SCATTER_SUM)
        if sums and self.merges_in_transit and not spec.traits.mergeable:
            return f"{self.name} merges partial sums, and {spec.payload.__name__} cannot be merged without loss"
        return None

    @abstractmethod
    def steps(self, world_size: int) -> int:
        """Rounds, one after the other, of one `Op.SUM`."""

    @abstractmethod
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
        """Bytes that a rank sends for one `Op.SUM` (headers apart), by formula.

        Args:
            world_size: Number of ranks.
            elements: Elements of the vector.
            density: Share of the elements that each rank sends, 1 for dense payloads; supports are taken as disjoint
                until their union is full.
            entry_bytes: Bytes of one sparse entry.
            dense_bytes: Bytes of one dense element.
            rank: Whose bytes. Without it, those of the rank that sends most, all index ranges taken as equal in size.
        """


def combine(op: Op, first: P, second: P) -> P:
    """Two contributions in one: the elementwise maximum for `Op.MAX`, else the sum."""
    return first.maximum(second) if op is Op.MAX else first.merge(second)


def sum_size(terms: int, elements: float, density: float, entry_bytes: float, dense_bytes: float) -> float:
    """Bytes of the sum of `terms` payloads with disjoint supports, sparse or dense, whichever is smaller."""
    entries = min(1.0, terms * density) * elements
    return min(entries * entry_bytes, elements * dense_bytes)


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
