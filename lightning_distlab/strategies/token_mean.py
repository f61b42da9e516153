"""The loss contract of a run: what its micro-batches count, summed over ranks beside the backward pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distlab.parallel.loss import LossContract


class TokenMean:
    """Applies one `LossContract` per rank of this process and agrees on the tokens of a step.

    Args:
        ranks: Ranks that this process plays.
        world_size: Ranks over which gradients are averaged.
        device: Where counts are summed.
    """

    def __init__(self, ranks: int, world_size: int, device: torch.device) -> None:
        self._contracts = [LossContract() for _ in range(ranks)]
        self._tokens: list[Any] = [None] * ranks
        self._world_size = world_size
        self._device = device
        self._sum: tuple[Tensor, dist.Work | None] | None = None

    def set_accumulation(self, factor: int) -> None:
        """Tell the number that Lightning divides each loss by."""
        for contract in self._contracts:
            contract.accumulate = factor

    def read(self, output: Any, rank: int = 0) -> Tensor:
        """The loss of what `training_step` returned on a rank; its tokens are remembered for `weigh`."""
        loss, self._tokens[rank] = self._contracts[rank].read(output)
        return loss

    def weigh(self, loss: Tensor, rank: int = 0) -> Tensor:
        """The loss to back-propagate on a rank."""
        return self._contracts[rank].weigh(loss, self._tokens[rank])

    def start(self) -> None:
        """Start summing this step's tokens over real ranks, so that the sum is there when the first bucket wants it."""
        contract = self._contracts[0]
        if len(self._contracts) == 1 and contract.exchanges:
            summary = contract.summary(self._device)
            self._sum = (summary, dist.all_reduce(summary, async_op=True) if self._world_size > 1 else None)

    def factor(self) -> float:
        """End the step: the factor of its gradients."""
        if len(self._contracts) > 1:
            total = torch.stack([contract.summary() for contract in self._contracts]).sum(dim=0)
            summed = total if self._contracts[0].exchanges else None
            return [contract.close(summed, self._world_size) for contract in self._contracts][-1]
        if self._sum is None:
            return self._contracts[0].close(None, self._world_size)
        (summary, work), self._sum = self._sum, None
        if work is not None:
            work.wait()
        return self._contracts[0].close(summary, self._world_size)
