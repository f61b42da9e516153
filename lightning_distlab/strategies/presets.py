"""Strategies by the name of what they send."""

from __future__ import annotations

from typing import Any

from lightning_distlab.collectives import ALIASES, COLLECTIVES
from lightning_distlab.collectives.base import Collective
from lightning_distlab.compression import DGC, QSGD, OneBit, PowerSGD, Sparse, TernGrad, Threshold
from lightning_distlab.payloads import COMPACT_WIRE, Wire
from lightning_distlab.strategies.checks import did_you_mean
from lightning_distlab.strategies.compressed import CompressedStrategy

_OF_STRATEGY = (
    "overlap",
    "virtual_ranks",
    "comm_state",
    "bucket_cap_mb",
    "find_unused_parameters",
    "check_replicas_every_n_steps",
    "start_method",
    "timeout_s",
    "process_group_backend",
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "static_graph",
    "gradient_as_bucket_view",
)


def collective_by_name(collective: str | Collective) -> Collective:
    """An exchange algorithm from its name.

    Raises:
        ValueError: No collective has that name.
    """
    if isinstance(collective, Collective):
        return collective
    name = ALIASES.get(collective, collective)
    if name not in COLLECTIVES:
        raise ValueError(
            f"collective={collective!r} is unknown{did_you_mean(collective, [*COLLECTIVES, *ALIASES])}; "
            f"use one of {', '.join(sorted([*COLLECTIVES, *ALIASES]))}."
        )
    return COLLECTIVES[name]()


def _divide(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the strategy, and all others, which the compressor checks."""
    strategy = {key: options.pop(key) for key in list(options) if key in _OF_STRATEGY}
    return strategy, options


class DGCStrategy(CompressedStrategy):
    """Deep Gradient Compression (Lin et al., ICLR 2018).

    Arguments:
        density: Share of the gradient entries that are sent.
        collective: Name of the exchange algorithm, or an instance.
        wire: Codecs; default Rice or bitmap indices, half-precision values, rounding errors fed back.
        **options: Options of `DGC` (`momentum_masking`, `clip_norm`, `warmup_epochs`, ...) and of `CompressedStrategy`.
    """

    def __init__(
        self,
        density: float = 0.001,
        *,
        collective: str | Collective = "ring",
        wire: Wire | None = COMPACT_WIRE,
        **options: Any,
    ) -> None:
        strategy, compressor = _divide(options)
        super().__init__(DGC(density=density, **compressor), collective_by_name(collective), wire=wire, **strategy)


class SparseStrategy(CompressedStrategy):
    """Sparse gradients with error feedback (Aji & Heafield, EMNLP 2017).

    Arguments:
        density: Share of the gradient entries that are sent.
        collective: Name of the exchange algorithm, or an instance.
        wire: Codecs; default Rice or bitmap indices, half-precision values, rounding errors fed back.
        **options: Options of `Sparse` (`scope`, ...) and of `CompressedStrategy`.
    """

    def __init__(
        self,
        density: float = 0.01,
        *,
        collective: str | Collective = "ring",
        wire: Wire | None = COMPACT_WIRE,
        **options: Any,
    ) -> None:
        strategy, compressor = _divide(options)
        super().__init__(Sparse(density=density, **compressor), collective_by_name(collective), wire=wire, **strategy)


class PowerSGDStrategy(CompressedStrategy):
    """PowerSGD (Vogels, Karimireddy and Jaggi, NeurIPS 2019).

    Arguments:
        rank: Columns of the factors.
        collective: Name of the exchange algorithm, or an instance; factors are dense, so any will do.
        wire: Codecs; by default factors travel in fp32.
        **options: Options of `PowerSGD` (`warm_start`, `min_compression_rate`, ...) and of `CompressedStrategy`.
    """

    def __init__(
        self, rank: int = 2, *, collective: str | Collective = "native", wire: Wire | None = None, **options: Any
    ) -> None:
        strategy, compressor = _divide(options)
        super().__init__(PowerSGD(rank=rank, **compressor), collective_by_name(collective), wire=wire, **strategy)


class OneBitStrategy(CompressedStrategy):
    """1-bit SGD (Seide et al., Interspeech 2014).

    Arguments:
        collective: Name of the exchange algorithm, or an instance; one that adds at the destination.
        wire: Codecs of what is not compressed; exact by default.
        **options: Options of `OneBit` (`exclude`, ...) and of `CompressedStrategy`.
    """

    def __init__(self, *, collective: str | Collective = "gather", wire: Wire | None = None, **options: Any) -> None:
        strategy, compressor = _divide(options)
        super().__init__(OneBit(**compressor), collective_by_name(collective), wire=wire, **strategy)


class ThresholdStrategy(CompressedStrategy):
    """One quantum for each element that has grown to a threshold (Strom, Interspeech 2015).

    Arguments:
        threshold: The quantum, in units of the gradient.
        collective: Name of the exchange algorithm, or an instance.
        wire: Codecs of the indices, and of what is not compressed; exact by default.
        **options: Options of `Threshold` and of `CompressedStrategy`.
    """

    def __init__(
        self,
        threshold: float = 0.001,
        *,
        collective: str | Collective = "gather",
        wire: Wire | None = None,
        **options: Any,
    ) -> None:
        strategy, compressor = _divide(options)
        method = Threshold(threshold=threshold, **compressor)
        super().__init__(method, collective_by_name(collective), wire=wire, **strategy)


class TernGradStrategy(CompressedStrategy):
    """TernGrad (Wen et al., NeurIPS 2017).

    Arguments:
        clip: Where gradients are clipped, in standard deviations; None for not at all.
        collective: Name of the exchange algorithm, or an instance.
        wire: Codecs of what is not compressed; exact by default.
        **options: Options of `TernGrad` (`code`, ...) and of `CompressedStrategy`.
    """

    def __init__(
        self,
        clip: float | None = 2.5,
        *,
        collective: str | Collective = "ring",
        wire: Wire | None = None,
        **options: Any,
    ) -> None:
        strategy, compressor = _divide(options)
        super().__init__(TernGrad(clip=clip, **compressor), collective_by_name(collective), wire=wire, **strategy)


class QSGDStrategy(CompressedStrategy):
    """Random rounding to a few bits (after QSGD, Alistarh et al., NeurIPS 2017).

    Arguments:
        bits: Of an element.
        collective: Name of the exchange algorithm, or an instance.
        wire: Codecs of what is not compressed; exact by default.
        **options: Options of `QSGD` (`block`, ...) and of `CompressedStrategy`.
    """

    def __init__(
        self, bits: int = 8, *, collective: str | Collective = "ring", wire: Wire | None = None, **options: Any
    ) -> None:
        strategy, compressor = _divide(options)
        super().__init__(QSGD(bits=bits, **compressor), collective_by_name(collective), wire=wire, **strategy)
