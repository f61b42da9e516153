"""Names for `Trainer(strategy="...")`; importing the package makes them known."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_distlab.strategies.compressed import CompressedStrategy
from lightning_distlab.strategies.presets import (
    DGCStrategy,
    OneBitStrategy,
    PowerSGDStrategy,
    QSGDStrategy,
    SparseStrategy,
    TernGradStrategy,
    ThresholdStrategy,
)
from lightning_distlab.strategies.stock_ddp import LightningDDP

NAMES: dict[str, tuple[type, str, dict[str, Any]]] = {
    "distlab_ddp": (CompressedStrategy, "Nothing compressed, the backend's all-reduce", {}),
    "lightning_ddp": (LightningDDP, "Lightning's own DDP", {}),
    "dgc_ring": (DGCStrategy, "Deep Gradient Compression over a ring", {"collective": "ring"}),
    "dgc_gather": (DGCStrategy, "Deep Gradient Compression, all-gathered", {"collective": "gather"}),
    "dgc_recursive_doubling": (
        DGCStrategy,
        "Deep Gradient Compression by recursive doubling",
        {"collective": "recursive_doubling"},
    ),
    "dgc_halving": (
        DGCStrategy,
        "Deep Gradient Compression by recursive halving and doubling",
        {"collective": "halving_doubling"},
    ),
    "dgc_ps": (DGCStrategy, "Deep Gradient Compression over a parameter server", {"collective": "parameter_server"}),
    "dgc_hierarchical": (
        DGCStrategy,
        "Deep Gradient Compression between nodes of 2 ranks, dense inside",
        {"collective": "hierarchical"},
    ),
    "sparse_halving": (
        SparseStrategy,
        "Top-k with error feedback by recursive halving and doubling",
        {"collective": "halving_doubling"},
    ),
    "sparse_ring": (SparseStrategy, "Top-k with error feedback over a ring", {"collective": "ring"}),
    "sparse_gather": (SparseStrategy, "Top-k with error feedback, all-gathered", {"collective": "gather"}),
    "powersgd": (PowerSGDStrategy, "PowerSGD over the backend's all-reduce", {}),
    "onebit": (OneBitStrategy, "1-bit SGD in its two phases", {}),
    "threshold": (ThresholdStrategy, "One quantum for what has grown to a threshold, all-gathered", {}),
    "terngrad": (TernGradStrategy, "TernGrad over a ring", {}),
    "qsgd": (QSGDStrategy, "Random rounding to 8 bits over a ring", {}),
}
"""Registered name: class, description, preset arguments. None of Lightning's own names is taken."""


def register() -> None:
    """Make the names known to Lightning; doing it again changes nothing."""
    for name, (strategy, description, options) in NAMES.items():
        StrategyRegistry.register(name, strategy, description=description, override=True, **options)
