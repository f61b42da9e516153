import pytest
from omegaconf import OmegaConf

from lightning_distlab.app.hparams import flat_hparams
from lightning_distlab.app.secrets import MASK, is_secret, masked
from tests.app.compose import composed


def test_settings_are_flat_scalars_under_stable_keys():
    with composed("strategy=dgc_ring", "strategy.compressor.density=0.01", "seed=3", "+data.api_key=hidden") as cfg:
        plain = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    flat = flat_hparams(plain, "dgc_ring", "digits_mlp", 2)
    assert flat["strategy.name"] == "dgc_ring"
    assert flat["strategy.density"] == 0.01
    assert (flat["strategy.compressor"], flat["strategy.collective"]) == ("DGC", "Ring")
    assert (flat["world_size"], flat["seed"]) == (2, 3)
    assert all(isinstance(value, str | int | float | bool) for value in flat.values())
    assert "hidden" not in flat.values()
    assert not any("_target_" in key for key in flat)


@pytest.mark.parametrize(
    "key", ["api_key", "apiKey_token", "TOKEN", "hub.password", "client-secret", "credentials", "key"]
)
def test_names_of_secrets(key):
    assert is_secret(key)


@pytest.mark.parametrize("key", ["monkey", "keyboard", "token_length", "density", "secretary"])
def test_names_that_are_none(key):
    assert not is_secret(key)


def test_masking_keeps_interpolations_as_written():
    cfg = OmegaConf.create({"a": [{"token": "x"}], "key": "${oc.env:KEY}", "password": None, "lr": 0.1})
    assert masked(cfg) == {"a": [{"token": MASK}], "key": "${oc.env:KEY}", "password": None, "lr": 0.1}
