"""Shapes of the networks on which the literature states its compression ratios."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Shapes = dict[str, tuple[int, ...]]
"""Shapes of all parameters, by name, in the order of the network."""


def alexnet() -> Shapes:
    """Krizhevsky et al. 2012, with the two groups of their two GPUs: 60,965,224 parameters."""
    convolutions = [(96, 3, 11, 11), (256, 48, 5, 5), (384, 256, 3, 3), (384, 192, 3, 3), (256, 192, 3, 3)]
    layers: list[tuple[int, ...]] = [*convolutions, (4096, 9216), (4096, 4096), (1000, 4096)]
    return {
        f"layer{i}.{kind}": shape
        for i, weight in enumerate(layers)
        for kind, shape in (("weight", weight), ("bias", weight[:1]))
    }


def resnet50() -> Shapes:
    """He et al. 2016: 25,557,032 parameters."""
    from torchvision.models import resnet50 as build

    return _on_meta(build)


def vgg16() -> Shapes:
    """Simonyan and Zisserman 2015, without batch normalisation: 138,357,544 parameters."""
    from torchvision.models import vgg16 as build

    return _on_meta(lambda: build(init_weights=False))


def ptb_lstm() -> Shapes:
    """Two layers of 1500, vocabulary 10,000, the decoder's weight tied to the embedding: 51,034,000 parameters."""
    rnn = _on_meta(lambda: nn.LSTM(1500, 1500, num_layers=2))
    return {
        "embedding.weight": (10_000, 1500),
        **{f"rnn.{k}": shape for k, shape in rnn.items()},
        "decoder.bias": (10_000,),
    }


def deepspeech() -> Shapes:
    """A network of DeepSpeech 2's kind and size: two convolutions over the spectrogram, five bidirectional LSTMs."""
    hidden = 1056

    def build() -> nn.Module:
        front = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11)), nn.BatchNorm2d(32), nn.Conv2d(32, 32, (21, 11)), nn.BatchNorm2d(32)
        )
        rnn = nn.LSTM(1312, hidden, num_layers=5, bidirectional=True)
        return nn.ModuleDict({"front": front, "rnn": rnn, "head": nn.Linear(2 * hidden, 29)})

    return _on_meta(build)


def _on_meta(build: Callable[[], nn.Module]) -> Shapes:
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in build().named_parameters()}


MODELS: dict[str, Callable[[], Shapes]] = {
    "alexnet": alexnet,
    "vgg16": vgg16,
    "resnet50": resnet50,
    "ptb_lstm": ptb_lstm,
    "deepspeech": deepspeech,
}
"""By the word that selects them."""
