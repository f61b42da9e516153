"""Exchange algorithms: pure generators of rounds."""

from collections.abc import Sequence

from lightning_distlab.collectives.auto import Auto
from lightning_distlab.collectives.balanced import Balanced
from lightning_distlab.collectives.base import (
    Collective,
    Exchange,
    NativeRound,
    Receive,
    Round,
    check_pair,
    combine,
)
from lightning_distlab.collectives.gather import Gather
from lightning_distlab.collectives.gtopk import GTopK
from lightning_distlab.collectives.halving_doubling import HalvingDoubling
from lightning_distlab.collectives.hierarchical import Hierarchical
from lightning_distlab.collectives.native import Native
from lightning_distlab.collectives.parameter_server import ParameterServer
from lightning_distlab.collectives.recursive_doubling import RecursiveDoubling
from lightning_distlab.collectives.ring import Ring
from lightning_distlab.collectives.sequential import Sequential
from lightning_distlab.collectives.tree import Tree
from lightning_distlab.payloads import RoundSpec

COLLECTIVES: dict[str, type[Collective]] = {
    kind.name: kind
    for kind in (
        Native,
        Gather,
        Ring,
        RecursiveDoubling,
        HalvingDoubling,
        Tree,
        ParameterServer,
        Hierarchical,
        Auto,
        GTopK,
        Balanced,
        Sequential,
    )
}
"""All algorithms, by name."""

ALIASES: dict[str, str] = {"parallel": "gather", "butterfly": "recursive_doubling", "rabenseifner": "halving_doubling"}
"""Other words for them."""


def legal_collectives(rounds: Sequence[RoundSpec]) -> list[str]:
    """Names of the algorithms that can carry all of a compressor's rounds."""
    return [name for name, kind in COLLECTIVES.items() if all(kind().supports(spec) is None for spec in rounds)]


__all__ = [
    "ALIASES",
    "COLLECTIVES",
    "Auto",
    "Balanced",
    "Collective",
    "Exchange",
    "GTopK",
    "Gather",
    "HalvingDoubling",
    "Hierarchical",
    "Native",
    "NativeRound",
    "ParameterServer",
    "Receive",
    "RecursiveDoubling",
    "Ring",
    "Round",
    "Sequential",
    "Tree",
    "check_pair",
    "combine",
    "legal_collectives",
]
