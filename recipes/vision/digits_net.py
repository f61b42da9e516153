"""Two small networks for 8x8 grey images (scikit-learn's digits)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override


class DigitsMLP(nn.Module):
    """Fully connected network without normalisation layers: (B, 1, 8, 8) -> (B, num_classes) logits.

    The default has 85,002 parameters, nearly all in three matrices, which makes it a fair small case for compression.

    Args:
        hidden: Widths of the hidden layers.
        num_classes: Number of logits.
        in_features: Number of pixels of an image.

    Raises:
        ValueError: If a width is not positive.
    """

    def __init__(self, hidden: Sequence[int] = (256, 256), num_classes: int = 10, in_features: int = 64) -> None:
        super().__init__()
        if any(width < 1 for width in hidden):
            raise ValueError(f"hidden={list(hidden)} has a width below 1: every hidden layer needs at least one unit.")
        widths = [in_features, *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for fan_in, fan_out in pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))

    @override
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


class DigitsConvNet(nn.Module):
    """Two 3x3 convolutions, one 2x2 max pooling, one linear layer: (B, 1, 8, 8) -> (B, num_classes) logits.

    Args:
        width: Channels of the first convolution; the second has twice as many.
        num_classes: Number of logits.

    Raises:
        ValueError: If ``width`` is not positive.
    """

    def __init__(self, width: int = 16, num_classes: int = 10) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"width={width} is below 1: the first convolution needs at least one channel.")
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.fc = nn.Linear(2 * width * 4 * 4, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))  # (B, width, 8, 8)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)  # (B, 2 width, 4, 4)
        logits: Tensor = self.fc(x.flatten(1))
        return logits
