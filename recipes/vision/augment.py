"""The usual CIFAR augmentation (pad by 4, random crop and mirror), drawn per image, applied to the batch at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def crop_flip(images: Tensor, dy: Tensor, dx: Tensor, mirror: Tensor, padding: int) -> Tensor:
    """Cuts one H x W window out of each zero-padded image, mirrored where asked, with a single gather.

    Args:
        images: (B, C, H, W), any dtype.
        dy: (B,) top row of each window in the padded image, 0 ... 2 padding.
        dx: (B,) left column of each window, 0 ... 2 padding.
        mirror: (B,) bool, whether to swap left and right after the crop.
        padding: Zeros added on each of the four sides.

    Returns:
        (B, C, H, W) of the same dtype.
    """
    B, C, H, W = images.shape
    padded = F.pad(images, (padding, padding, padding, padding))
    row_length = W + 2 * padding
    rows = dy[:, None] + torch.arange(H)  # (B, H)
    columns = torch.arange(W).expand(B, W)
    columns = dx[:, None] + torch.where(mirror[:, None], W - 1 - columns, columns)  # (B, W)
    source = rows[:, :, None] * row_length + columns[:, None, :]  # (B, H, W), position in a flattened padded channel
    return padded.flatten(2).gather(2, source.view(B, 1, H * W).expand(B, C, H * W)).view(B, C, H, W)


@dataclass(frozen=True)
class RandomCropFlip:
    """Random window of the padded image and, with probability 1/2, its mirror image (He et al. 2015, section 4.2).

    Every image of the batch gets its own offsets. All draws come from torch's global generator, so seeding it (which
    DataLoader does for each worker) fixes them.
    """

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ValueError(f"padding={self.padding} is negative: use 0 (no crop) or more.")

    def __call__(self, images: Tensor) -> Tensor:
        """Maps (B, C, H, W) to (B, C, H, W)."""
        B = len(images)
        dy, dx = torch.randint(0, 2 * self.padding + 1, (2, B)).unbind()
        mirror = torch.rand(B) < 0.5 if self.flip else torch.zeros(B, dtype=torch.bool)
        return crop_flip(images, dy, dx, mirror, self.padding)
