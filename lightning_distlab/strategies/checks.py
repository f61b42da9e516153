"""What a strategy refuses before any process is started."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_distlab.collectives import legal_collectives
from lightning_distlab.collectives.base import Collective, check_pair
from lightning_distlab.compression.base import Compressor
from lightning_distlab.strategies.launcher import START_METHODS

if TYPE_CHECKING:
    import lightning.pytorch as pl

OVERLAPS = ("bucket", "after_backward")
COMM_STATES = ("per_rank", "mean", "drop", "reset")


def check_options(
    compressor: Compressor,
    collective: Collective,
    overlap: str | None,
    comm_state: str,
    virtual_ranks: int,
    bucket_cap_mb: float,
    timeout_s: float,
    find_unused_parameters: bool,
    check_every: int,
    start_method: str,
) -> None:
    """Check what the constructor of a compressed strategy was given.

    Raises:
        ValueError: With the value, the rule, and the remedy.
    """
    check_pair(compressor.rounds, compressor.name, collective, legal_collectives(compressor.rounds))
    if collective.ranks_per_node > 1 and compressor.needs_whole_gradient:
        raise ValueError(
            f"collective='{collective.name}' averages inside a node before anything is compressed, but "
            f"{compressor.name} as configured looks at each rank's whole gradient first (a norm or a threshold over "
            "all tensors). Use a per-tensor setting of the compressor."
        )
    if getattr(collective, "dedicated", False):
        raise ValueError(
            "dedicated=True sets a rank apart that only adds, but every rank of a Trainer trains. Use "
            "dedicated=False, where the server is one of the workers."
        )
    if overlap is not None and overlap not in OVERLAPS:
        raise ValueError(
            f"overlap={overlap!r} is unknown{did_you_mean(overlap, OVERLAPS)}; use bucket or after_backward."
        )
    if overlap == "bucket" and compressor.needs_whole_gradient:
        raise ValueError(
            f"overlap='bucket' sends buckets during the backward pass, but {compressor.name} as configured needs the "
            f"whole gradient first (a norm or a threshold over all tensors). Use overlap='after_backward', or a "
            f"per-tensor setting of the compressor."
        )
    if overlap == "bucket" and find_unused_parameters:
        raise ValueError(
            "find_unused_parameters=True with overlap='bucket': DDP hands zeros for unused parameters to its hook and "
            "drops what comes back, so residuals would be lost. Use overlap='after_backward', where unused parameters "
            "are fine."
        )
    if comm_state not in COMM_STATES:
        raise ValueError(f"comm_state={comm_state!r} is unknown; use one of {', '.join(COMM_STATES)}.")
    if not isinstance(virtual_ranks, int) or virtual_ranks < 1:
        raise ValueError(f"virtual_ranks={virtual_ranks!r} must be a whole number of at least 1.")
    if virtual_ranks > 1 and overlap == "bucket":
        raise ValueError(
            f"virtual_ranks={virtual_ranks} plays all ranks in one process, after the backward pass; leave overlap "
            f"unset or use overlap='after_backward'."
        )
    if bucket_cap_mb <= 0:
        raise ValueError(f"bucket_cap_mb={bucket_cap_mb} must be positive; 25 is torch's default.")
    if not isinstance(check_every, int) or check_every < 0:
        raise ValueError(f"check_replicas_every_n_steps={check_every!r} must be a whole number; 0 never checks.")
    if start_method not in START_METHODS:
        raise ValueError(
            f"start_method={start_method!r} is unknown{did_you_mean(str(start_method), START_METHODS)}; "
            f"use one of {', '.join(START_METHODS)}."
        )
    if timeout_s <= 0:
        raise ValueError(f"timeout_s={timeout_s} must be positive: seconds after which a silent rank counts as lost.")


def check_run(trainer: pl.Trainer, module: pl.LightningModule, compressor: Compressor, virtual_ranks: int) -> None:
    """Check a trainer and a module before processes are launched.

    Raises:
        ValueError: With the value, the rule, and the remedy.
    """
    if trainer.gradient_clip_val and compressor.refuses_clipping:
        raise ValueError(f"Trainer(gradient_clip_val={trainer.gradient_clip_val}): {compressor.refuses_clipping}")
    devices = trainer.num_devices * trainer.num_nodes
    if virtual_ranks > 1 and devices > 1:
        raise ValueError(
            f"virtual_ranks={virtual_ranks} plays all ranks in one process, but devices x nodes = {devices}. "
            f"Use trainer.devices=1, or virtual_ranks=1 for {devices} real ranks."
        )
    if virtual_ranks > 1 and not module.automatic_optimization:
        raise ValueError(
            f"virtual_ranks={virtual_ranks} runs training_step once per rank before one optimizer step, so it needs "
            f"automatic optimization; {type(module).__name__} optimizes manually. Use real ranks (trainer.devices=N)."
        )
    if virtual_ranks > 1 and trainer._accelerator_connector._layer_sync is not None:
        raise ValueError(
            "sync_batchnorm=True has no meaning with virtual_ranks: ranks run one after the other. Leave it off."
        )
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise ValueError(
                f"{name or type(child).__name__} yields sparse gradients (sparse=True), which cannot be exchanged by "
                f"position. Build it with sparse=False."
            )
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise ValueError(
                f"Parameter {name} is complex ({parameter.dtype}), and magnitudes, signs and codecs are defined for "
                f"real numbers. Hold its real and imaginary parts as two real parameters (torch.view_as_real)."
            )


def check_devices(root_device: torch.device, layer_sync: Any) -> None:
    """Refuse what the device cannot do.

    Raises:
        ValueError: sync_batchnorm on a CPU, for which torch has no kernel.
    """
    if layer_sync is not None and root_device.type == "cpu":
        raise ValueError(
            "sync_batchnorm=True needs GPUs: torch's SyncBatchNorm has no CPU kernel. Set sync_batchnorm=False; "
            "running statistics are averaged over ranks at every evaluation and checkpoint anyway."
        )


def check_dense(name: str, gradient: Tensor | None) -> None:
    """Refuse a sparse gradient that no layer has announced.

    Raises:
        ValueError: The gradient's layout is sparse.
    """
    if gradient is not None and gradient.layout != torch.strided:
        raise ValueError(
            f"The gradient of {name} is sparse ({gradient.layout}), which cannot be exchanged by position. Have it "
            f"computed densely: sparse=False of embeddings."
        )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' (did you mean ...?)' with the nearest known words, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""
