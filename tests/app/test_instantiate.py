import functools
import sys

import pytest
import torch
from omegaconf import OmegaConf

from lightning_distlab.app.instantiate import TargetNotAllowedError, allow_targets, instantiate


def test_builds_nested_objects_with_plain_containers():
    config = OmegaConf.create(
        {
            "_target_": "torch.nn.Sequential",
            "_args_": [{"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}],
        }
    )
    built = instantiate(config)
    assert built[0].weight.shape == (3, 2)


def test_builds_partials():
    optimizer = instantiate(OmegaConf.create({"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.5}))
    assert isinstance(optimizer, functools.partial)
    assert optimizer([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"] == 0.5


VICTIM = "the file that must survive"


@pytest.mark.parametrize(
    "target",
    [
        "pathlib.Path.unlink",
        "lightning.pytorch.callbacks.model_checkpoint.Path.unlink",
        "lightning_distlab.app.loggers.Path",
        "lightning_distlab.app.instantiate.allow_targets",
        "lightning_distlab.strategies.child_processes.subprocess.run",
        "lightning_distlab.cli.main",
        "lightning.pytorch.LightningModule.load_from_checkpoint",
        "recipes.vision.classifier.ImageClassifier.load_from_checkpoint",
        "lightning.pytorch.seed_everything",
        "torch.load",
        "torch.hub.load",
        "torch.nn.init.torch.load",
        "builtins.eval",
        "os.system",
        "lightning.pytorch.nowhere",
        "lightning",
    ],
)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("partial", [False, True])
def test_refuses_what_is_not_on_the_list(target, nested, partial, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text(VICTIM)
    config = {"_target_": target, "_args_": [str(victim)], "_partial_": partial}
    if nested:
        config = {"_target_": "torch.nn.Identity", "a": [{"b": config}]}
    with pytest.raises(TargetNotAllowedError, match=target.rpartition(".")[2]):
        instantiate(OmegaConf.create(config), "model")
    assert victim.read_text() == VICTIM


def test_nothing_is_built_before_everything_is_checked(monkeypatch):
    built = []
    monkeypatch.setattr(torch.nn.Identity, "__init__", lambda self, **kwargs: built.append(kwargs))
    config = [{"_target_": "torch.nn.Identity"}, {"_target_": "os.getcwd"}]
    with pytest.raises(TargetNotAllowedError, match=r"model\[1\]\._target_"):
        instantiate(OmegaConf.create(config), "model")
    assert built == []


def test_an_interpolated_target_is_checked_after_resolution():
    config = OmegaConf.create({"name": "os.getcwd", "part": {"_target_": "${name}"}})
    with pytest.raises(TargetNotAllowedError, match=r"os\.getcwd"):
        instantiate(config.part)


def test_text_that_would_be_interpolated_once_more_is_refused():
    config = OmegaConf.create({"_target_": "torch.nn.Identity", "a": r"\${oc.env:HOME}"})
    with pytest.raises(TargetNotAllowedError, match="interpolated again"):
        instantiate(config)


def test_programs_may_add_their_own_package(monkeypatch):
    monkeypatch.setattr(sys.modules["lightning_distlab.app.instantiate"], "_added", [])
    config = {"_target_": "fractions.Fraction", "numerator": 1, "denominator": 2}
    with pytest.raises(TargetNotAllowedError, match=r"allow_targets\('mypkg\.'\)"):
        instantiate(config)
    allow_targets("fractions.")
    assert float(instantiate(config)) == 0.5


@pytest.mark.parametrize("prefix", ["mypkg", "", ".", "mypkg.Class"])
def test_a_prefix_without_its_dot_is_refused(prefix):
    with pytest.raises(ValueError, match="end with a dot"):
        allow_targets(prefix)
