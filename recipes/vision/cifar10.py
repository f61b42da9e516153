"""CIFAR-10 (Krizhevsky 2009) for Lightning: decoded once, held as bytes, augmented a batch at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from typing_extensions import override

from recipes.vision.augment import RandomCropFlip
from recipes.vision.data_module import ImageDataModule
from recipes.vision.decode_cache import default_cache_dir, load_decoded
from recipes.vision.image_sources import CIFAR10_CLASSES, SPLITS, find_source
from recipes.vision.in_memory import InMemoryImages
from recipes.vision.splits import stratified_split

# Per channel over the 50,000 training images, in units of bytes / 255.
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)


class CIFAR10DataModule(ImageDataModule):
    """50,000 training and 10,000 test images, (B, 3, 32, 32) float32, normalised per channel.

    By default all 50,000 images train and the test set serves as validation set too, as in the papers' tables: then
    ``val/acc`` is a test accuracy, and choosing an epoch by it is choosing on the test set. ``val_size`` holds images
    out instead. Training drops the short last batch, so that every step averages over equal batches.

    Args:
        root: Directory with Parquet files, an image folder, or the original archive (see ``image_sources``).
        batch_size: Images per rank and step.
        num_workers: Loader processes; 0 suffices, as a batch of 32 costs a fraction of a millisecond.
        val_size: Training images held out for validation, the same for every seed, stratified by class. 0: see above.
        augment: Random crop and mirror on training images.
        cache_dir: Where decoded images are kept; default the user's cache directory.
        download: Fetch the original archive into ``root`` if it is not there.

    Raises:
        ValueError: If the directory does not hold the data and ``download`` is off, or an argument is out of range.
    """

    num_classes = len(CIFAR10_CLASSES)
    class_names = CIFAR10_CLASSES

    def __init__(
        self,
        root: str,
        *,
        batch_size: int = 32,
        num_workers: int = 0,
        val_size: int = 0,
        augment: bool = True,
        cache_dir: str | None = None,
        download: bool = False,
    ) -> None:
        super().__init__(batch_size, num_workers)
        if not 0 <= val_size < 50_000:
            raise ValueError(f"val_size={val_size} is outside 0 ... 49,999, the training images that can be held out.")
        self.root = Path(root)
        self.cache_dir = Path(cache_dir) if cache_dir else default_cache_dir()
        self.val_size = val_size
        self.augment, self.download = augment, download
        if not download:
            find_source(self.root)
        self.save_hyperparameters(
            {"root": str(root), "batch_size": batch_size, "num_workers": num_workers, "val_size": val_size}
            | {"augment": augment, "cache_dir": cache_dir, "download": download}
        )

    @override
    def prepare_data(self) -> None:
        """Downloads if asked and decodes both splits into the cache, on one rank per machine."""
        try:
            source = find_source(self.root)
        except ValueError:
            if not self.download:
                raise
            from torchvision.datasets import CIFAR10

            CIFAR10(str(self.root), download=True)
            source = find_source(self.root)
        for split in SPLITS:
            load_decoded(self.cache_dir, source, self.root, split)

    @override
    def setup(self, stage: str) -> None:
        if self._splits:
            return
        source = find_source(self.root)
        train, test = (load_decoded(self.cache_dir, source, self.root, split) for split in SPLITS)
        mean, std = 255 * torch.tensor(MEAN), 255 * torch.tensor(STD)
        augment = RandomCropFlip() if self.augment else None
        self._splits["test"] = InMemoryImages(test.images, test.labels, mean=mean, std=std)
        if self.val_size == 0:
            self._splits["train"] = InMemoryImages(train.images, train.labels, mean=mean, std=std, augment=augment)
            self._splits["val"] = self._splits["test"]
            return
        kept, held_out = stratified_split(train.labels, self.val_size)
        self._splits["train"] = InMemoryImages(
            train.images, train.labels, mean=mean, std=std, augment=augment, subset=kept
        )
        self._splits["val"] = InMemoryImages(train.images, train.labels, mean=mean, std=std, subset=held_out)
