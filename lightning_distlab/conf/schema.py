"""Typed schemas of the strategy configurations: names, types and words are checked before anything is built.

Ranges and what settings mean together are checked once, by the class that owns the value: they hold without Hydra too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hydra.core.config_store import ConfigStore


class StartMethod(StrEnum):
    """How ranks are started on one machine."""

    popen = "popen"
    fork = "fork"
    spawn = "spawn"
    forkserver = "forkserver"


class Overlap(StrEnum):
    """When gradients are exchanged."""

    bucket = "bucket"
    after_backward = "after_backward"


class CommState(StrEnum):
    """What checkpoints hold of residuals and momenta."""

    per_rank = "per_rank"
    mean = "mean"
    drop = "drop"
    reset = "reset"


class IndexCodec(StrEnum):
    """How positions are written."""

    int32 = "int32"
    run16 = "run16"
    rice = "rice"
    bitmap = "bitmap"
    auto = "auto"


class ValueCodec(StrEnum):
    """How values are written; ``exact`` in the gradient's own precision."""

    exact = "exact"
    fp64 = "fp64"
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"
    int8 = "int8"


# Over what the threshold of sparse gradients is taken; `global` is a keyword, so no class body can hold it.
Scope = StrEnum("Scope", {"global": "global", "tensor": "tensor"})


class ClipMode(StrEnum):
    """Which norm local clipping uses."""

    exact = "exact"
    tensor = "tensor"
    previous = "previous"


@dataclass
class WireConf:
    """Codecs of the messages."""

    _target_: str = "lightning_distlab.payloads.Wire"
    index: IndexCodec = IndexCodec.auto
    value: ValueCodec = ValueCodec.exact
    dense: ValueCodec = ValueCodec.exact


@dataclass
class NoCompressionConf:
    """Nothing compressed."""

    _target_: str = "lightning_distlab.compression.NoCompression"


@dataclass
class SparseConf:
    """Top-k with error feedback."""

    _target_: str = "lightning_distlab.compression.Sparse"
    density: float = 0.01
    scope: Scope = Scope["global"]
    exclude_vectors: bool = True
    min_numel: int = 256
    exclude: list[str] = field(default_factory=list)


@dataclass
class DGCConf:
    """Deep Gradient Compression."""

    _target_: str = "lightning_distlab.compression.DGC"
    density: float = 0.001
    momentum_correction: bool = True
    momentum_masking: bool = True
    clip_norm: float | None = None
    clip_mode: ClipMode = ClipMode.exact
    warmup_epochs: float = 0.0
    warmup_steps: int = 0
    dense_when_cheaper: bool = True
    exclude_vectors: bool = True
    min_numel: int = 256
    exclude: list[str] = field(default_factory=list)


@dataclass
class PowerSGDConf:
    """Two thin factors of each matrix."""

    _target_: str = "lightning_distlab.compression.PowerSGD"
    rank: int = 2
    warm_start: bool = True
    min_compression_rate: float = 2.0
    exclude: list[str] = field(default_factory=list)


@dataclass
class OneBitConf:
    """One bit an element, two means a column."""

    _target_: str = "lightning_distlab.compression.OneBit"
    min_numel: int = 256
    exclude: list[str] = field(default_factory=lambda: ["*embed*"])


@dataclass
class ThresholdConf:
    """One quantum for each element that has grown to a threshold."""

    _target_: str = "lightning_distlab.compression.Threshold"
    threshold: float = 0.001
    exclude_vectors: bool = True
    min_numel: int = 256
    exclude: list[str] = field(default_factory=list)


class LevelCode(StrEnum):
    """How three levels are written."""

    two_bit = "two_bit"
    base3 = "base3"


@dataclass
class TernGradConf:
    """Three levels, right on average."""

    _target_: str = "lightning_distlab.compression.TernGrad"
    clip: float | None = 2.5
    code: LevelCode = LevelCode.two_bit
    exclude_vectors: bool = True
    min_numel: int = 256
    exclude: list[str] = field(default_factory=list)


@dataclass
class QSGDConf:
    """Random rounding to a few bits."""

    _target_: str = "lightning_distlab.compression.QSGD"
    bits: int = 8
    block: int = 8192
    exclude_vectors: bool = True
    min_numel: int = 256
    exclude: list[str] = field(default_factory=list)


class HalfPrecision(StrEnum):
    """Half-precision types."""

    bf16 = "bf16"
    fp16 = "fp16"


@dataclass
class CastConf:
    """Gradients in half precision."""

    _target_: str = "lightning_distlab.compression.Cast"
    dtype: HalfPrecision = HalfPrecision.bf16


@dataclass
class CollectiveConf:
    """An exchange algorithm without options."""

    _target_: str = "???"


@dataclass
class ParameterServerConf:
    """One rank adds everything up."""

    _target_: str = "lightning_distlab.collectives.ParameterServer"
    server: int = 0
    delay: int = 0


class OuterCollective(StrEnum):
    """Algorithms between nodes."""

    ring = "ring"
    recursive_doubling = "recursive_doubling"
    halving_doubling = "halving_doubling"
    tree = "tree"


@dataclass
class HierarchicalConf:
    """Dense inside a node, anything between nodes."""

    _target_: str = "lightning_distlab.collectives.Hierarchical"
    ranks_per_node: int = 2
    outer: OuterCollective = OuterCollective.recursive_doubling


@dataclass
class AutoConf:
    """The fastest algorithm by the alpha-beta model."""

    _target_: str = "lightning_distlab.collectives.Auto"
    latency_s: float = 50e-6
    gbit_per_s: float = 10.0


@dataclass
class CompressedConf:
    """Any compressor over any collective."""

    _target_: str = "lightning_distlab.strategies.compressed.CompressedStrategy"
    compressor: Any = None
    collective: Any = None
    wire: WireConf | None = None
    overlap: Overlap | None = None
    virtual_ranks: int = 1
    comm_state: CommState = CommState.per_rank
    bucket_cap_mb: float = 25.0
    find_unused_parameters: bool = False
    check_replicas_every_n_steps: int = 0
    start_method: StartMethod = StartMethod.popen
    timeout_s: float = 1800.0
    process_group_backend: str | None = None


@dataclass
class LightningDDPConf:
    """Options of Lightning's own DDP."""

    _target_: str = "lightning_distlab.strategies.stock_ddp.LightningDDP"
    start_method: StartMethod = StartMethod.popen
    timeout_s: float = 1800.0
    process_group_backend: str | None = None
    find_unused_parameters: bool = False


_SCHEMAS: dict[str, dict[str, type]] = {
    "schema/strategy": {"compressed": CompressedConf, "lightning_ddp": LightningDDPConf},
    "schema/strategy/compressor": {
        "none": NoCompressionConf,
        "sparse": SparseConf,
        "dgc": DGCConf,
        "powersgd": PowerSGDConf,
        "onebit": OneBitConf,
        "threshold": ThresholdConf,
        "terngrad": TernGradConf,
        "qsgd": QSGDConf,
        "cast": CastConf,
    },
    "schema/strategy/collective": {
        "any": CollectiveConf,
        "parameter_server": ParameterServerConf,
        "hierarchical": HierarchicalConf,
        "auto": AutoConf,
    },
    "schema/strategy/wire": {"any": WireConf},
}


def register_schemas() -> None:
    """Put the schemas into Hydra's store, in groups below ``schema/``, where they are no options of ``strategy=``."""
    store = ConfigStore.instance()
    for group, nodes in _SCHEMAS.items():
        for name, node in nodes.items():
            store.store(group=group, name=name, node=node)
