"""Lightning strategies that cut communication and split models.

Importing the package makes its strategies known by name (`Trainer(strategy="dgc_ring")`) and its configurations to
Hydra (`hydra.searchpath: [pkg://lightning_distlab.conf]`).
"""

from lightning_distlab import conf as _conf  # registers the schemas of the strategy configurations
from lightning_distlab.strategies import (
    CompressedStrategy,
    DGCStrategy,
    LightningDDP,
    OneBitStrategy,
    PowerSGDStrategy,
    QSGDStrategy,
    SparseStrategy,
    TernGradStrategy,
    ThresholdStrategy,
)

__version__ = "0.1.0"

__all__ = [
    "CompressedStrategy",
    "DGCStrategy",
    "LightningDDP",
    "OneBitStrategy",
    "PowerSGDStrategy",
    "QSGDStrategy",
    "SparseStrategy",
    "TernGradStrategy",
    "ThresholdStrategy",
    "__version__",
]

del _conf
