"""Sizes of really encoded messages against the compression table of the DGC paper (headers included)."""

import math

import pytest
import torch

from lightning_distlab.collectives.base import Collective
from lightning_distlab.compression import DGC, Param, Step
from lightning_distlab.exchange.bucket import Entry, exchange_bucket
from lightning_distlab.payloads import PAPER_WIRE, Flags, Op, Wire

BYTES = Wire(index="rice", value="int8", dense="int8")
RICE_HALF = Wire(index="rice", value="fp16", dense="fp16")


def alexnet_grouped():
    """Krizhevsky et al. 2012, with the two groups of their two GPUs."""
    convolutions = [(96, 3, 11, 11), (256, 48, 5, 5), (384, 256, 3, 3), (384, 192, 3, 3), (256, 192, 3, 3)]
    linear = [(4096, 9216), (4096, 4096), (1000, 4096)]
    return [shape for weight in convolutions + linear for shape in (weight, weight[:1])]


def resnet50():
    models = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        return [tuple(p.shape) for p in models.resnet50().parameters()]


def ptb_lstm_tied():
    """Two layers of 1500, vocabulary 10,000, the decoder's weight tied to the embedding."""
    hidden, vocabulary = 1500, 10_000
    layer = [(4 * hidden, hidden), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,)]
    return [(vocabulary, hidden), *layer, *layer, (vocabulary,)]


class Recorder(Collective):
    """One rank's sum is its own message, which is kept."""

    name = "recorder"
    ops = frozenset({Op.SUM})

    def run(self, op, payload, rank, world_size):
        self.message = payload
        return payload
        yield

    def steps(self, world_size):
        return 0

    def sum_bytes(self, world_size, elements, density, entry_bytes, dense_bytes):
        return 0.0


def message_of(shapes, wire):
    """What DGC at 0.1 % sends for a whole model as one bucket, with normally distributed gradients."""
    generator = torch.Generator().manual_seed(7)
    compressor, recorder, entries = DGC(density=0.001), Recorder(), []
    for i, shape in enumerate(shapes):
        param = Param(f"tensor{i}", torch.empty(shape, device="meta"))
        numel = math.prod(shape)
        state = {} if compressor.exclusion.reason(param) else {"velocity": torch.zeros(1).expand(numel)}
        entries.append(Entry(param, torch.empty(numel).normal_(generator=generator), state))
    running = exchange_bucket(entries, compressor, recorder, wire, Step(0, 0.0, 0, 1), Flags.NONE)
    with pytest.raises(StopIteration):
        next(running)
    return recorder.message


@pytest.mark.parametrize(
    ("shapes", "weights", "rest", "wire", "ratio"),
    [
        (alexnet_grouped, 60_954_656, 10_568, PAPER_WIRE, 597.0),
        (alexnet_grouped, 60_954_656, 10_568, RICE_HALF, 1050.0),
        (alexnet_grouped, 60_954_656, 10_568, BYTES, 1400.0),
        (resnet50, 25_502_912, 54_120, BYTES, 700.0),
        (resnet50, 25_502_912, 54_120, PAPER_WIRE, 276.0),
        (ptb_lstm_tied, 51_000_000, 34_000, PAPER_WIRE, 461.0),
    ],
    ids=["alexnet", "alexnet-rice-fp16", "alexnet-bytes", "resnet50-bytes", "resnet50", "ptb-lstm"],
)
def test_ratio_of_a_really_encoded_message(shapes, weights, rest, wire, ratio):
    sizes = shapes()
    assert sum(math.prod(s) for s in sizes if len(s) > 1) == weights
    assert sum(math.prod(s) for s in sizes if len(s) <= 1) == rest

    message = message_of(sizes, wire)
    buffer = message.encode()

    assert buffer.numel() == message.wire_size()
    assert 4 * (weights + rest) / buffer.numel() >= ratio, 4 * (weights + rest) / buffer.numel()
    sent = next(part for part in message.parts if hasattr(part, "indices"))
    assert sent.indices.numel() == sum(max(1, round(0.001 * math.prod(s))) for s in sizes if len(s) > 1)
    arrived = message.decode(buffer)
    for part, other in zip(message.parts, arrived.parts, strict=True):
        assert torch.equal(part.values, other.values)
        if part is sent:
            assert torch.equal(part.indices, other.indices)
