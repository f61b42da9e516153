"""Sizes of really encoded messages, and the bytes of many ranks against exchanges that are really carried out."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from lightning_distlab.cli import app
from lightning_distlab.collectives import COLLECTIVES
from lightning_distlab.compression import Param
from lightning_distlab.exchange.drivers import InProcessDriver
from lightning_distlab.exchange.engine import Engine
from lightning_distlab.report.compression_table import METHODS, measure
from lightning_distlab.report.model_shapes import MODELS

pytest.importorskip("torchvision")
COUNTS = {
    "alexnet": 60_965_224, "vgg16": 138_357_544, "resnet50": 25_557_032, "ptb_lstm": 51_034_000,
}  # fmt: skip
SMALL = {"a.weight": (96, 80), "b.weight": (64, 16, 3, 3), "a.bias": (96,)}


@pytest.mark.parametrize("model", MODELS)
def test_models_have_their_published_size(model):
    numel = sum(math.prod(shape) for shape in MODELS[model]().values())
    assert numel == COUNTS[model] if model in COUNTS else abs(numel - 127.9e6) < 1e6


@pytest.mark.parametrize("label", METHODS)
def test_bytes_of_a_rank_bound_those_of_a_real_exchange(label):
    """Real supports overlap a little, and ranges are not all alike; headers are many on so small a network."""
    method, ranks = METHODS[label], 8
    generator = torch.Generator().manual_seed(1)
    gradients = {n: torch.randn(math.prod(s), generator=generator) for n, s in SMALL.items()}
    row = measure("small", label, SMALL, gradients)
    params = {n: Param(n, torch.zeros(s)) for n, s in SMALL.items()}
    driver = InProcessDriver(ranks)
    engine = Engine(method.make(), COLLECTIVES[method.over](), driver, params, method.wire)
    for _ in range(2):
        before = driver.ledger.bytes_sent(0)
        grads = {r: {n: torch.randn(s, generator=generator) for n, s in SMALL.items()} for r in range(ranks)}
        engine.begin()
        if engine.compressor.needs_whole_gradient:
            engine.observe(grads)
        engine.submit(grads)
        engine.finish()
    sent = driver.ledger.bytes_sent(0) - before
    headers = 2 * 2 * (ranks - 1) * 200
    assert 0.75 * row.bytes_per_rank_8 - headers <= sent <= 1.1 * row.bytes_per_rank_8 + headers
    assert row.bytes_per_rank_8 < row.bytes_per_rank_64
    assert row.ratio == pytest.approx(row.dense_bytes / row.payload_bytes)


def test_command(tmp_path):
    result = CliRunner().invoke(
        app,
        ["compression-table", "--models", "resnet50", "--compressors", "dgc", "--json", str(tmp_path / "rows.json"),
         "--page", str(tmp_path / "page.md")],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = {row["compressor"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert set(next(iter(rows.values()))) == {
        "model", "compressor", "dense_bytes", "payload_bytes", "ratio", "bytes_per_rank_8", "bytes_per_rank_64",
        "codec_ms",
    }  # fmt: skip
    assert rows["dgc 0.1 %, paper's wire"]["ratio"] > 276
    assert rows["dgc 0.1 %, byte"]["ratio"] > 700
    assert "| resnet50 | dgc 0.1 %, byte |" in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize("words", [["--models", "lenet"], ["--compressors", "zip"]])
def test_unknown_words_are_refused(words):
    result = CliRunner().invoke(app, ["compression-table", *words])
    assert isinstance(result.exception, ValueError)
    assert "must be" in str(result.exception)
