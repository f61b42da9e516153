"""Fixed stratified splits."""

from __future__ import annotations

import torch
from torch import Tensor


def stratified_split(labels: Tensor, held_out: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Splits positions 0 ... N-1 so that each class keeps its share, by a fixed draw.

    Within each class the positions are shuffled and spread evenly over [0, 1); the ``held_out`` smallest places of all
    classes together are held out. Counts per class therefore differ from the exact share by less than 1.

    Args:
        labels: (N,) class of each item.
        held_out: Number of items in the second part.
        seed: Of the shuffle; it is not the training seed.

    Returns:
        Positions of the first part (N - held_out,) and of the second (held_out,), each increasing.

    Raises:
        ValueError: If ``held_out`` leaves one part empty.
    """
    if not 0 < held_out < len(labels):
        raise ValueError(f"{held_out} of {len(labels)} items cannot be held out: use 1 ... {len(labels) - 1}.")
    generator = torch.Generator().manual_seed(seed)
    place = torch.empty(len(labels), dtype=torch.float64)
    for label in labels.unique():
        members = (labels == label).nonzero().squeeze(1)
        shuffled = members[torch.randperm(len(members), generator=generator)]
        place[shuffled] = (torch.arange(len(members), dtype=torch.float64) + 0.5) / len(members)
    order = place.argsort(stable=True)
    return order[held_out:].sort().values, order[:held_out].sort().values
