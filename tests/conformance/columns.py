"""The columns of the capability table: one for each base strategy, and the aliases of pairs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

import lightning_distlab.strategies  # noqa: F401  (registers the names)
from lightning_distlab.payloads import Wire

SMALL: dict[str, Any] = {"density": 0.1, "min_numel": 16}
SPARSE_LOSSLESS: dict[str, Any] = {"density": 1.0, "min_numel": 16, "wire": Wire()}
DGC_LOSSLESS: dict[str, Any] = {**SPARSE_LOSSLESS, "momentum_masking": False}


@dataclass(frozen=True)
class Column:
    """A strategy as the suite uses it.

    Attributes:
        name: Heading.
        registered: Its name for `Trainer(strategy=...)`.
        options: Arguments for most runs: on networks this small something must be compressed at all.
        lossless: Arguments with which it must equal one process.
        virtual: Ranks are virtual.
    """

    name: str
    registered: str
    options: dict[str, Any] = field(default_factory=dict)
    lossless: dict[str, Any] = field(default_factory=dict)
    virtual: bool = False
    ranks: int = 2

    @property
    def devices(self) -> int:
        """Processes."""
        return 1 if self.virtual else self.ranks

    def build(self, lossless: bool = False, **options: Any) -> Any:
        """An instance with forked ranks."""
        entry = StrategyRegistry[self.registered]
        chosen = {**entry["init_params"], "start_method": "fork", "timeout_s": 30.0}
        chosen.update(self.lossless if lossless else self.options)
        if self.virtual:
            chosen["virtual_ranks"] = self.ranks
        return entry["strategy"](**{**chosen, **options})


ALL_DENSE: dict[str, Any] = {"exclude": ["*"]}
POWER_LOSSLESS: dict[str, Any] = {"min_compression_rate": 1e9}  # no matrix is that large: all travel whole

BASE = (
    Column("distlab_ddp", "distlab_ddp"),
    Column("sparse_gather", "sparse_gather", SMALL, SPARSE_LOSSLESS),
    Column("dgc_ring", "dgc_ring", SMALL, DGC_LOSSLESS),
    Column("powersgd", "powersgd", {"rank": 1, "min_compression_rate": 1.0}, POWER_LOSSLESS),
    Column("onebit", "onebit", {"min_numel": 16}, ALL_DENSE),
    Column("threshold", "threshold", {"min_numel": 16, "threshold": 0.01}, ALL_DENSE),
    Column("terngrad", "terngrad", {"min_numel": 16}, ALL_DENSE),
    Column("qsgd", "qsgd", {"min_numel": 16}, ALL_DENSE),
    Column("dgc_ring, virtual", "dgc_ring", SMALL, DGC_LOSSLESS, virtual=True),
)
ALIASES = (
    Column("sparse_ring", "sparse_ring", SMALL, SPARSE_LOSSLESS),
    Column("dgc_gather", "dgc_gather", SMALL, DGC_LOSSLESS),
    Column("dgc_recursive_doubling", "dgc_recursive_doubling", SMALL, DGC_LOSSLESS),
    Column("dgc_halving", "dgc_halving", SMALL, DGC_LOSSLESS),
    Column("dgc_ps", "dgc_ps", SMALL, DGC_LOSSLESS),
    Column("dgc_hierarchical", "dgc_hierarchical", SMALL, DGC_LOSSLESS),
    Column("sparse_halving", "sparse_halving", SMALL, SPARSE_LOSSLESS),
)
