"""What a user hands to `Trainer(strategy=...)`."""

import lightning

from lightning_distlab.strategies.compat import check_lightning_version
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
from lightning_distlab.strategies.registry import NAMES, register
from lightning_distlab.strategies.stock_ddp import LightningDDP

check_lightning_version(lightning.__version__)
register()

__all__ = [
    "NAMES",
    "CompressedStrategy",
    "DGCStrategy",
    "LightningDDP",
    "OneBitStrategy",
    "PowerSGDStrategy",
    "QSGDStrategy",
    "SparseStrategy",
    "TernGradStrategy",
    "ThresholdStrategy",
]
