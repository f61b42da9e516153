"""Compressors: what a rank sends instead of its gradient."""

from lightning_distlab.compression.base import Compression, Compressor, Hyper, Param, Scratch, State, Step
from lightning_distlab.compression.dgc import DGC
from lightning_distlab.compression.none import NoCompression
from lightning_distlab.compression.powersgd import PowerSGD
from lightning_distlab.compression.sparse import Sparse

COMPRESSORS: dict[str, type[Compressor]] = {cls.name: cls for cls in (NoCompression, Sparse, DGC, PowerSGD)}
"""Compressors by the word that selects them."""

__all__ = [
    "COMPRESSORS",
    "DGC",
    "Compression",
    "Compressor",
    "Hyper",
    "NoCompression",
    "Param",
    "PowerSGD",
    "Scratch",
    "Sparse",
    "State",
    "Step",
]
