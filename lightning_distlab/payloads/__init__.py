"""What travels between ranks, and its form on the wire."""

from lightning_distlab.payloads.base import Payload, Traits, accumulation_dtype, even_bounds
from lightning_distlab.payloads.bundle import Bundle, Flags
from lightning_distlab.payloads.dense import DensePayload, ExactPayload
from lightning_distlab.payloads.levels import LevelPayload
from lightning_distlab.payloads.operations import Op, Reply, Request, RoundSpec
from lightning_distlab.payloads.quanta import QuantaPayload
from lightning_distlab.payloads.signs import SignPayload
from lightning_distlab.payloads.sparse import SparsePayload
from lightning_distlab.payloads.wire import COMPACT_WIRE, PAPER_WIRE, Wire

__all__ = [
    "COMPACT_WIRE",
    "PAPER_WIRE",
    "Bundle",
    "DensePayload",
    "ExactPayload",
    "Flags",
    "LevelPayload",
    "Op",
    "Payload",
    "QuantaPayload",
    "Reply",
    "Request",
    "RoundSpec",
    "SignPayload",
    "SparsePayload",
    "Traits",
    "Wire",
    "accumulation_dtype",
    "even_bounds",
]
