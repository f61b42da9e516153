"""Networks by name, so that a checkpoint's hyper-parameters (plain strings and numbers) can rebuild the network."""

from __future__ import annotations

import re

from torch import nn

from recipes.vision.digits_net import DigitsConvNet, DigitsMLP
from recipes.vision.resnet_cifar import CifarResNet


def build_net(name: str, num_classes: int = 10) -> nn.Module:
    """Builds a network from its name.

    Args:
        name: ``resnet<6n+2>`` (``resnet8``, ``resnet20``, ``resnet110``), ``digits_mlp`` or ``digits_convnet``.
        num_classes: Number of logits.

    Raises:
        ValueError: If the name is unknown or the depth is not 6n + 2.
    """
    if match := re.fullmatch(r"resnet(\d+)", name):
        return CifarResNet(int(match[1]), num_classes=num_classes)
    if name == "digits_mlp":
        return DigitsMLP(num_classes=num_classes)
    if name == "digits_convnet":
        return DigitsConvNet(num_classes=num_classes)
    raise ValueError(
        f"net={name!r} is unknown: use resnet<6n+2> (say resnet20), digits_mlp or digits_convnet, or pass an nn.Module."
    )
