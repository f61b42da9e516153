"""A data set of decoded images in memory that serves whole batches, so that no Python runs per image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

Batch = tuple[Tensor, Tensor]
"""(B, C, H, W) float32 images and (B,) int64 labels."""


class InMemoryImages(Dataset[Batch]):
    """Images as bytes; a batch is picked, augmented and normalised in a few vectorised operations.

    ``DataLoader`` calls ``__getitems__`` with all indices of a batch where a data set has it. Any sampler works, the
    distributed one too; pass ``collate_fn=as_collated``, since a batch arrives complete.

    Args:
        images: (N, C, H, W) uint8.
        labels: (N,) int64.
        mean: (C,) or number, in units of the stored bytes (0 ... 255).
        std: (C,) or number, likewise.
        augment: Maps a (B, C, H, W) uint8 batch to one of equal shape.
        subset: Positions in ``images`` that this data set consists of; default all.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        mean: Tensor | float,
        std: Tensor | float,
        augment: Callable[[Tensor], Tensor] | None = None,
        subset: Tensor | None = None,
    ) -> None:
        assert images.dtype == torch.uint8
        assert len(images) == len(labels)
        self.images, self.labels, self.augment, self.subset = images, labels, augment, subset
        self.mean = torch.as_tensor(mean, dtype=torch.float32).view(-1, 1, 1)
        self.std = torch.as_tensor(std, dtype=torch.float32).view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.labels) if self.subset is None else len(self.subset)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Returns the batch of these indices: (B, C, H, W) float32 and (B,) int64."""
        picked = torch.as_tensor(indices)
        if self.subset is not None:
            picked = self.subset[picked]
        images = self.images[picked]
        if self.augment is not None:
            images = self.augment(images)
        return images.float().sub_(self.mean).div_(self.std), self.labels[picked]

    @override
    def __getitem__(self, index: int) -> Batch:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]


def as_collated(batch: Any) -> Any:
    """``collate_fn`` for data sets whose ``__getitems__`` returns a complete batch."""
    return batch


def image_loader(dataset: InMemoryImages, batch_size: int, num_workers: int, *, train: bool) -> DataLoader[Batch]:
    """Returns the loader for one split: shuffled and without a short last batch for training, complete otherwise."""
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=train,
        drop_last=train,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        collate_fn=as_collated,
    )


def check_loader_args(batch_size: int, num_workers: int) -> None:
    """Raises ValueError for a batch size below 1 or a negative number of workers."""
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} is below 1: it is the number of images per rank and step.")
    if num_workers < 0:
        raise ValueError(f"num_workers={num_workers} is negative: 0 loads in the training process.")


def check_enough(images: int, batch_size: int, world_size: int) -> None:
    """Raises ValueError where ``world_size`` ranks cannot fill one batch each, as training drops short batches."""
    if images < batch_size * world_size:
        raise ValueError(
            f"{images} training images do not fill one batch of {batch_size} on each of {world_size} ranks: "
            f"lower batch_size to {max(1, images // world_size)} or use fewer ranks."
        )
