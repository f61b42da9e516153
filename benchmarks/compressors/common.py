"""What the contestants of `benchmarks/compressors.py` share: the tensors, and a peer that has the same gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

WORLD = 2
"""Ranks that are averaged: this one, and a peer whose messages are copies of ours."""


class Baseline(Protocol):
    """A method in plain torch operations, layer by layer, as an experienced user of `torch.distributed` would write it.

    Where the method communicates it calls `all_reduce` or `all_gather` below. It may keep anything between steps.
    """

    def step(self, grads: Mapping[str, Tensor]) -> None:
        """Turn gradients, in the shapes of their parameters, into averages over `WORLD` ranks, in place."""


def all_reduce(tensor: Tensor) -> None:
    """The sum over ranks, in place, as if every rank had sent the same."""
    tensor.mul_(WORLD)


def all_gather(tensor: Tensor) -> list[Tensor]:
    """Every rank's tensor, as if all had sent the same."""
    return [tensor, *(tensor.clone() for _ in range(WORLD - 1))]


def resnet18_shapes(classes: int = 10) -> dict[str, tuple[int, ...]]:
    """Parameters of ResNet-18 in its form for CIFAR-10 (3x3 stem), 11,173,962 elements, in the order of the network."""
    shapes: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, 3, 3)}

    def norm(name: str, width: int) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (width,)

    norm("bn1", 64)
    width_in = 64
    for layer, width in enumerate((64, 128, 256, 512), start=1):
        for block in (0, 1):
            name = f"layer{layer}.{block}"
            shapes[f"{name}.conv1.weight"] = (width, width_in, 3, 3)
            norm(f"{name}.bn1", width)
            shapes[f"{name}.conv2.weight"] = (width, width, 3, 3)
            norm(f"{name}.bn2", width)
            if width_in != width:
                shapes[f"{name}.downsample.0.weight"] = (width, width_in, 1, 1)
                norm(f"{name}.downsample.1", width)
            width_in = width
    shapes["fc.weight"], shapes["fc.bias"] = (classes, 512), (classes,)
    return shapes


def random_gradients(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Normally distributed gradients, fp32, by name."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
