"""scikit-learn's digits for Lightning: 1,797 grey images of 8x8 pixels that need no download."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from recipes.vision.data_module import ImageDataModule
from recipes.vision.in_memory import InMemoryImages
from recipes.vision.splits import stratified_split


class DigitsDataModule(ImageDataModule):
    """Handwritten digits, (B, 1, 8, 8) float32, normalised by mean and deviation of the training pixels.

    The split is stratified and fixed, whatever the training seed. Training drops the short last batch.

    Args:
        batch_size: Images per rank and step.
        num_workers: Loader processes.
        val_size: Images for validation.
        test_size: Images for the test.

    Raises:
        ValueError: If an argument is out of range.
    """

    num_classes = 10
    class_names = tuple("0123456789")

    def __init__(self, batch_size: int = 16, num_workers: int = 0, val_size: int = 180, test_size: int = 360) -> None:
        super().__init__(batch_size, num_workers)
        if val_size < 1 or test_size < 1 or val_size + test_size >= 1_797:
            raise ValueError(
                f"val_size={val_size} and test_size={test_size}: each must be at least 1, and both together below the "
                f"1,797 images there are."
            )
        self.val_size, self.test_size = val_size, test_size
        self.save_hyperparameters()

    @override
    def setup(self, stage: str) -> None:
        if self._splits:
            return
        images, labels = load_digit_images()
        rest, test = stratified_split(labels, self.test_size)
        kept, held_out = stratified_split(labels[rest], self.val_size)
        pixels = images[rest[kept]].float()
        mean, std = pixels.mean(), pixels.std()
        for name, subset in {"train": rest[kept], "val": rest[held_out], "test": test}.items():
            self._splits[name] = InMemoryImages(images, labels, mean=mean, std=std, subset=subset)


def load_digit_images() -> tuple[Tensor, Tensor]:
    """Returns (1797, 1, 8, 8) uint8 pixels of 0 ... 16 and (1797,) int64 labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).to(torch.uint8).unsqueeze(1)
    return images, torch.from_numpy(digits.target).long()
