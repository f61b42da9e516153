from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

import lightning_distlab.conf  # noqa: F401  registers the schemas
from recipes.vision.classifier import ImageClassifier
from recipes.vision.digits import DigitsDataModule

CONF = Path(__file__).parents[2] / "conf"


def composed(*overrides):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", list(overrides))


@pytest.mark.parametrize("model", ["digits_mlp", "resnet8", "resnet20", "resnet110"])
@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [("optimizer=sgd", torch.optim.SGD), ("optimizer=adamw", torch.optim.AdamW), ("~optimizer", torch.optim.SGD)],
)
def test_every_model_with_every_optimizer(model, optimizer, kind):
    cfg = composed(f"model={model}", optimizer, "strategy=lightning_ddp", "model.lr=0.0625")
    module = instantiate(cfg.model)
    assert isinstance(module, ImageClassifier)
    built = module._build_optimizer()
    assert type(built) is kind
    assert built.defaults["lr"] == 0.0625
    assert built.param_groups[0]["weight_decay"] == cfg.model.weight_decay
    assert module.hparams["net"] == model


def test_adamw_brings_its_own_learning_rate():
    cfg = composed("model=resnet20", "optimizer=adamw", "strategy=lightning_ddp")
    assert (cfg.model.lr, cfg.model.optimizer.lr, cfg.model.optimizer.weight_decay) == (1e-3, 1e-3, 1e-2)


def test_digits_data():
    assert isinstance(instantiate(composed("data=digits", "strategy=lightning_ddp").data), DigitsDataModule)


def test_cifar10_directory_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("DISTLAB_DATA", str(tmp_path))
    assert composed("data=cifar10", "strategy=lightning_ddp").data.root == f"{tmp_path}/cifar10"
    monkeypatch.delenv("DISTLAB_DATA")
    assert composed("data=cifar10", "strategy=lightning_ddp").data.root == "data/cifar10"


def test_the_papers_recipe():
    cfg = composed("experiment=resnet110_cifar10")
    module = instantiate(cfg.model)
    assert sum(p.numel() for p in module.parameters()) == 1_727_962
    assert cfg.trainer.devices * cfg.data.batch_size == 256
    assert (cfg.trainer.max_epochs, cfg.model.milestones) == (164, [81, 122])
    assert (cfg.model.lr, cfg.model.momentum, cfg.model.weight_decay) == (0.1, 0.9, 1e-4)
    assert (cfg.strategy.compressor.density, cfg.strategy.compressor.warmup_epochs) == (0.001, 4)
    assert cfg.strategy.virtual_ranks == 1


@pytest.mark.parametrize("strategy", ["dgc_ring", "sparse_ring", "ddp"])
def test_the_quick_protocol_is_the_same_for_every_strategy(strategy):
    cfg = composed("experiment=cifar10_quick", f"strategy={strategy}")
    steps_per_epoch = 50_000 // 4 // cfg.data.batch_size
    assert cfg.trainer.max_epochs * steps_per_epoch >= 2_000
    assert cfg.strategy.virtual_ranks == 4
    assert cfg.trainer.devices == 1
    assert cfg.strategy.compressor.get("density", 0.01) == 0.01
    assert (strategy == "ddp") == ("density" not in cfg.strategy.compressor)
