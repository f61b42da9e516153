"""CIFAR residual networks of depth 6n + 2 (He et al. 2015, "Deep Residual Learning", section 4.2)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

WIDTHS = (16, 32, 64)
"""Channels of the three stages, on feature maps of 32x32, 16x16 and 8x8."""


def blocks_per_stage(depth: int) -> int:
    """Returns n for a depth of 6n + 2.

    Args:
        depth: Number of weighted layers: one stem convolution, 6n convolutions in 3n blocks, one linear layer.

    Raises:
        ValueError: If no n >= 1 gives this depth; the message names the nearest valid depths.
    """
    n, remainder = divmod(depth - 2, 6)
    if remainder == 0 and n >= 1:
        return n
    below, above = 6 * n + 2, 6 * (n + 1) + 2
    nearest = "depth is 8" if n < 1 else f"depths are {below} and {above}"
    raise ValueError(f"depth={depth} is not 6n + 2 with n >= 1: the nearest valid {nearest}.")


class OptionAShortcut(nn.Module):
    """Parameter-free shortcut "A" of the paper: subsample with stride 2, fill the new channels with zeros.

    (B, C, H, W) -> (B, C + extra, ceil(H/2), ceil(W/2)).
    """

    def __init__(self, extra_channels: int) -> None:
        super().__init__()
        self.extra_channels = extra_channels

    @override
    def forward(self, x: Tensor) -> Tensor:
        # F.pad counts dims from the last: W, H, then C (behind the existing channels).
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.extra_channels))


class BasicBlock(nn.Module):
    """y = relu(shortcut(x) + BN(conv(relu(BN(conv(x)))))), two 3x3 convolutions, the first with the stride."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        widens = out_channels != in_channels
        stride = 2 if widens else 1
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut = OptionAShortcut(out_channels - in_channels) if widens else nn.Identity()

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x), inplace=True)


class CifarResNet(nn.Module):
    """Residual network for 32x32 images: (B, 3, 32, 32) -> (B, num_classes) logits.

    Parameters: 0.27 M at depth 20, 1.7 M at depth 110. Weights of convolutions and of the classifier are drawn after
    He et al. 2015 ("Delving Deep into Rectifiers", equation 10): normal with variance 2 / fan-in, biases zero.

    Args:
        depth: 6n + 2: 8, 14, 20, 32, 44, 56, 110, ...
        num_classes: Number of logits.
        in_channels: Channels of the input image.

    Raises:
        ValueError: If ``depth`` is not 6n + 2.
    """

    def __init__(self, depth: int = 20, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        n = blocks_per_stage(depth)
        self.depth = depth
        self.conv = nn.Conv2d(in_channels, WIDTHS[0], 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(WIDTHS[0])
        stages, channels = [], WIDTHS[0]
        for width in WIDTHS:
            stages.append(nn.Sequential(BasicBlock(channels, width), *(BasicBlock(width, width) for _ in range(n - 1))))
            channels = width
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(channels, num_classes)
        self.apply(_he_init)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x)), inplace=True)  # (B, 16, 32, 32)
        x = self.stages(x)  # (B, 64, 8, 8)
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


def _he_init(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)
