"""Compressors: what a rank sends instead of its gradient."""

from lightning_distlab.compression.base import Compression, Compressor, Hyper, Param, Scratch, State, Step
from lightning_distlab.compression.cast import Cast
from lightning_distlab.compression.dgc import DGC
from lightning_distlab.compression.none import NoCompression
from lightning_distlab.compression.onebit import OneBit
from lightning_distlab.compression.powersgd import PowerSGD
from lightning_distlab.compression.qsgd import QSGD
from lightning_distlab.compression.sparse import Sparse
from lightning_distlab.compression.terngrad import TernGrad
from lightning_distlab.compression.threshold import Threshold

COMPRESSORS: dict[str, type[Compressor]] = {
    cls.name: cls for cls in (NoCompression, Cast, Sparse, DGC, PowerSGD, OneBit, Threshold, TernGrad, QSGD)
}
"""Compressors by the word that selects them."""

__all__ = [
    "COMPRESSORS",
    "DGC",
    "QSGD",
    "Cast",
    "Compression",
    "Compressor",
    "Hyper",
    "NoCompression",
    "OneBit",
    "Param",
    "PowerSGD",
    "Scratch",
    "Sparse",
    "State",
    "Step",
    "TernGrad",
    "Threshold",
]
