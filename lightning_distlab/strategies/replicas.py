"""What keeps data-parallel replicas alike apart from gradients: running statistics, and a check that they are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_distlab.exchange.ledger import Ledger


def average_buffers(module: nn.Module, ledger: Ledger, rank: int, world_size: int) -> None:
    """Average floating-point buffers (BatchNorm's running statistics) over all ranks, in fp64, in one message.

    Integer buffers, which count steps, are the same everywhere. The traffic enters the ledger under `buffers`.
    """
    buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    if not buffers:
        return
    flat = torch.cat([buffer.detach().reshape(-1).to(torch.float64) for buffer in buffers])
    dist.all_reduce(flat)
    flat /= world_size
    start = 0
    for buffer in buffers:
        buffer.copy_(flat[start : start + buffer.numel()].view_as(buffer))
        start += buffer.numel()
    account = ledger.account(rank, "replicate", "buffers")
    account.bytes_sent += round(2 * flat.numel() * flat.element_size() * (world_size - 1) / world_size)
    account.messages += 2 * (world_size - 1)
    account.steps += 2 * (world_size - 1)
    account.modelled = True


def check_replicas(parameters: Sequence[Tensor], device: torch.device) -> None:
    """Compare the weights of all ranks bit for bit, by a checksum.

    Raises:
        RuntimeError: They differ; names the ranks that differ from rank 0.
    """
    bits = torch.zeros(2, dtype=torch.int64, device=device)
    for position, parameter in enumerate(parameters):
        raw = parameter.detach().contiguous().view(-1).view(torch.uint8).to(torch.int64)
        weights = torch.arange(1, raw.numel() + 1, device=raw.device) % 65521
        bits[0] = (bits[0] * 31 + raw.sum() * (position + 1)) % (2**61 - 1)
        bits[1] = (bits[1] * 37 + (raw * weights).sum()) % (2**61 - 1)
    everyone = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, bits)
    different = [rank for rank, other in enumerate(everyone) if not torch.equal(other, everyone[0])]
    if different:
        raise RuntimeError(f"The replicas have drifted apart: ranks {different} differ from rank 0.")


def check_same_model(module: nn.Module, device: torch.device) -> None:
    """Compare names, shapes, dtypes and `requires_grad` of all ranks' parameters, before anything is exchanged.

    Raises:
        ValueError: They differ; on every rank, with the numbers of each.
    """
    named = list(module.named_parameters())
    text = "\n".join(f"{n} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for n, p in named)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    trainable = [p.numel() for _, p in named if p.requires_grad]
    facts = torch.tensor([digest, len(trainable), sum(trainable)], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(facts) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, facts)
    different = [rank for rank, other in enumerate(everyone) if not torch.equal(other, everyone[0])]
    if different:
        rows = "; ".join(f"rank {r}: {int(everyone[r][1])} of {int(everyone[r][2]):,}" for r in (0, *different[:3]))
        raise ValueError(
            f"The model of rank{'s' * (len(different) > 1)} {', '.join(map(str, different))} differs from that of rank "
            f"0 in the names, shapes, dtypes or requires_grad of its parameters (trainable tensors, of so many "
            f"elements: {rows}). Build the same model on all ranks."
        )
