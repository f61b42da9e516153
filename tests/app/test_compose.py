import dataclasses
import inspect
from pathlib import Path

import hydra
import pytest
import yaml
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from lightning_distlab.app.build import build
from lightning_distlab.app.instantiate import instantiate
from lightning_distlab.compression.dgc import CLIP_MODES
from lightning_distlab.compression.sparse import SCOPES
from lightning_distlab.conf import schema
from lightning_distlab.payloads.codecs import INDEX_CODECS, VALUE_CODECS
from lightning_distlab.strategies.checks import COMM_STATES, OVERLAPS
from lightning_distlab.strategies.compressed import CompressedStrategy
from lightning_distlab.strategies.launcher import START_METHODS
from lightning_distlab.strategies.stock_ddp import LightningDDP
from tests.app.compose import EXPERIMENTS, ROOT, STRATEGIES, composed


@pytest.mark.parametrize(("name", "extra"), [("train", []), ("eval", ["ckpt_path=a.ckpt"])])
def test_primaries_resolve_without_holes(name, extra):
    with composed(*extra, name=name) as cfg:
        OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_is_built_as_configured(strategy):
    with composed(f"strategy={strategy}") as cfg:
        built = instantiate(cfg.strategy, "strategy")
        settings = cfg.strategy
        if strategy == "lightning_ddp":
            assert type(built) is LightningDDP
            return
        assert type(built) is CompressedStrategy
        assert built.compressor.name == _defaults(strategy)["compressor"]
        assert built.collective.name == _defaults(strategy)["collective"]
        assert (built.wire.index, built.wire.value) == (settings.wire.index, settings.wire.value)


def _defaults(strategy: str) -> dict[str, str]:
    text = (ROOT / "lightning_distlab" / "conf" / "strategy" / f"{strategy}.yaml").read_text()
    parts = [part for part in yaml.safe_load(text)["defaults"] if isinstance(part, dict)]
    return {key: str(value) for part in parts for key, value in part.items()}


def test_a_pair_is_put_together_on_the_command_line():
    words = ("strategy=compressed", "strategy/compressor=dgc", "strategy/collective=gather", "strategy/wire=paper")
    with composed(*words, "strategy.compressor.density=0.02") as cfg:
        built = instantiate(cfg.strategy, "strategy")
    assert (built.compressor.name, built.compressor.density) == ("dgc", 0.02)
    assert (built.collective.name, built.wire.index) == ("gather", "run16")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_with_every_strategy(experiment):
    for strategy in STRATEGIES:
        with composed(f"experiment={experiment}", f"strategy={strategy}") as cfg:
            plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
            if strategy != "lightning_ddp":
                assert plain["strategy"]["virtual_ranks"] == plain["protocol"]["virtual_ranks"]
            if strategy.startswith(("dgc", "sparse")):
                assert plain["strategy"]["compressor"]["density"] == plain["protocol"]["density"]


@pytest.mark.parametrize("debug", sorted(path.stem for path in (ROOT / "conf" / "debug").glob("*.yaml")))
def test_every_debug_configuration_builds_a_trainer(debug, tmp_path):
    with composed(f"debug={debug}", "strategy=lightning_ddp", "trainer.devices=1", folder=tmp_path) as cfg:
        parts = build(cfg)
    assert parts.trainer.loggers == [] or debug == "fdr"
    assert parts.cfg["task_name"] == "debug"


@pytest.mark.parametrize("group", ["trainer", "callbacks", "logger", "hparams_search", "model", "data", "optimizer"])
def test_every_other_option_composes(group):
    for path in sorted((ROOT / "conf" / group).glob("*.yaml")):
        if group == "callbacks" and path.stem in ("model_checkpoint", "early_stopping", "model_summary"):
            continue  # parts of default
        with composed(f"{group}={path.stem}") as cfg:
            OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("strategy.compressor.density=abc", "could not be converted to Float"),
        ("strategy.overlap=sometimes", "expected one of [bucket, after_backward]"),
        ("strategy.compressor.densty=1", "densty"),
        ("strategy.wire.index=zip", "expected one of"),
    ],
)
def test_schema_refuses_wrong_types_words_and_keys(override, message):
    with pytest.raises(ConfigCompositionException) as caught, composed(override):
        pass
    assert message in f"{caught.value} {caught.value.__cause__}"


def test_words_of_the_schema_are_the_words_of_the_classes():
    assert {*schema.IndexCodec} == {*INDEX_CODECS}
    assert {*schema.ValueCodec} == {*VALUE_CODECS, "exact"}
    assert {*schema.Overlap} == {*OVERLAPS}
    assert {*schema.CommState} == {*COMM_STATES}
    assert {*schema.ClipMode} == {*CLIP_MODES}
    assert {*schema.Scope} == {*SCOPES}
    assert {*schema.StartMethod} == {*START_METHODS}


def test_checkpoint_names_need_no_quotes_on_the_command_line(tmp_path):
    with composed("strategy=lightning_ddp", folder=tmp_path) as cfg:
        checkpoint = instantiate(cfg.callbacks.model_checkpoint)
    assert "=" not in checkpoint.format_checkpoint_name({"epoch": 3, "step": 7})


def test_package_folders_hold_an_init_file():
    for folder in [ROOT / "lightning_distlab" / "conf", *(ROOT / "lightning_distlab" / "conf").rglob("*")]:
        if Path(folder).is_dir() and folder.name != "__pycache__":
            assert (folder / "__init__.py").exists(), folder


def test_defaults_of_the_schema_are_the_defaults_of_the_classes():
    for conf in (schema.SparseConf, schema.DGCConf, schema.CompressedConf, schema.WireConf):
        signature = inspect.signature(hydra.utils.get_class(conf._target_)).parameters
        for field in dataclasses.fields(conf):
            if field.name == "_target_":
                continue
            default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
            theirs = signature[field.name].default
            assert default == (list(theirs) if isinstance(theirs, tuple) else theirs), (conf, field.name)
