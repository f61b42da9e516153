"""What the methods share: the tensors, and a peer that has the same gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torchvision.models import resnet18

WORLD = 2
"""Ranks that are averaged: this one, and a peer whose messages are copies of ours."""


class Baseline(Protocol):
    """A method in plain torch operations, layer by layer, as an experienced user of `torch.distributed` would write it.

    Where the method communicates it calls `all_reduce` or `exchange` below. It may keep anything between steps.
    """

    def step(self, grads: Mapping[str, Tensor]) -> None:
        """Turn gradients, in the shapes of their parameters, into averages over `WORLD` ranks, in place."""


def all_reduce(tensor: Tensor) -> None:
    """The sum over ranks, in place, as if every rank had sent the same."""
    tensor.mul_(WORLD)


def exchange(message: Tensor) -> list[Tensor]:
    """The messages of all ranks, in rank order, as if every rank had sent the same."""
    return [message, *(message.clone() for _ in range(WORLD - 1))]


def pack_bits(flags: Tensor) -> Tensor:
    """Booleans as bytes of eight, planar: the i-th eighth of the flags is bit i. [n] -> uint8, [ceil(n / 8)]."""
    rows = torch.nn.functional.pad(flags.to(torch.uint8), (0, -flags.numel() % 8)).view(8, -1)
    return (rows << torch.arange(8, dtype=torch.uint8).view(8, 1)).sum(0, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The inverse of `pack_bits`: bool, [count]."""
    return ((packed >> torch.arange(8, dtype=torch.uint8).view(8, 1)) & 1).view(-1)[:count].bool()


def resnet18_shapes() -> dict[str, tuple[int, ...]]:
    """Parameters of ResNet-18 in its form for CIFAR-10 (3x3 stem), 11,173,962 elements, in the order of the network."""
    with torch.device("meta"):
        net = resnet18(num_classes=10)
        net.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    return {name: tuple(param.shape) for name, param in net.named_parameters()}


def random_gradients(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Normally distributed gradients, fp32, by name."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
