"""What the image data modules share: loaders over splits that lie in memory."""

from __future__ import annotations

import lightning.pytorch as pl
from torch.utils.data import DataLoader
from typing_extensions import override

from recipes.vision.in_memory import Batch, InMemoryImages, check_enough, check_loader_args, image_loader


class ImageDataModule(pl.LightningDataModule):
    """Loaders for the splits `train`, `val` and `test`, which a subclass fills in `setup`.

    Args:
        batch_size: Images per rank and step.
        num_workers: Loader processes.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(self, batch_size: int, num_workers: int) -> None:
        super().__init__()
        check_loader_args(batch_size, num_workers)
        self.batch_size, self.num_workers = batch_size, num_workers
        self._splits: dict[str, InMemoryImages] = {}

    @override
    def train_dataloader(self) -> DataLoader[Batch]:
        world_size = self.trainer.world_size if self.trainer else 1
        check_enough(len(self._splits["train"]), self.batch_size, world_size)
        return image_loader(self._splits["train"], self.batch_size, self.num_workers, train=True)

    @override
    def val_dataloader(self) -> DataLoader[Batch]:
        return image_loader(self._splits["val"], self.batch_size, self.num_workers, train=False)

    @override
    def test_dataloader(self) -> DataLoader[Batch]:
        return image_loader(self._splits["test"], self.batch_size, self.num_workers, train=False)
