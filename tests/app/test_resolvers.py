import re

import pytest
import torch.distributed as dist

from lightning_distlab.app.resolvers import recipe_name, run_stamp, strategy_name
from tests.app.compose import composed


@pytest.fixture(autouse=True)
def _fresh_stamp():
    run_stamp.cache_clear()
    yield
    run_stamp.cache_clear()


def test_one_stamp_per_process():
    first = run_stamp()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-\d{3}", first)
    assert run_stamp() == first


def test_ranks_of_torchrun_agree_through_the_agents_store(monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "0")
    first = run_stamp()
    run_stamp.cache_clear()
    monkeypatch.setenv("RANK", "1")
    assert run_stamp() == first
    run_stamp.cache_clear()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run_stamp() != first


def test_torchrun_without_a_store_needs_a_run_id(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(ValueError, match="--rdzv-id"):
        run_stamp()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "night-run")
    assert run_stamp() == "night-run"


@pytest.mark.parametrize(
    ("overrides", "strategy", "recipe"),
    [
        ([], "dgc_ring", "digits_mlp"),
        (["strategy=ddp", "model=resnet8"], "ddp", "resnet8"),
        (
            ["strategy=compressed", "strategy/compressor=sparse", "strategy/collective=gather"],
            "sparse_gather",
            "digits_mlp",
        ),
        (["experiment=cifar10_quick"], "dgc_ring", "cifar10_quick"),
    ],
)
def test_names_of_strategy_and_recipe(overrides, strategy, recipe):
    with composed(*overrides) as cfg:
        assert (strategy_name(), recipe_name()) == (strategy, recipe)
        assert cfg.logger.wandb.name == f"{strategy}-s0"
        assert cfg.logger.wandb.group == f"{strategy} x {recipe}"
