"""Every strategy of the configuration trains: two forked ranks, two steps."""

import json
import math

import pytest
from hydra.core.hydra_config import HydraConfig

from lightning_distlab.app import run_job, train
from tests.app.compose import STRATEGIES, composed

SHORT = (
    "trainer.max_epochs=1",
    "trainer.devices=2",
    "trainer.limit_train_batches=2",
    "trainer.limit_val_batches=1",
    "trainer.limit_test_batches=1",
    "strategy.start_method=fork",
    "callbacks=none",
    "logger=none",
)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategy_trains(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with composed(f"strategy={strategy}", *SHORT, folder=tmp_path) as cfg:
        assert HydraConfig.initialized()
        metric = run_job(train, cfg)
    assert metric is not None
    assert 0.0 <= metric <= 1.0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["world_size"]) == (2, 2)
    assert math.isfinite(summary["wall_s"])
    if strategy != "lightning_ddp":
        assert summary["comm/bytes_sent_per_rank"] > 0
        assert summary["comm/skipped_steps"] == 0
