import os
import sys
from pathlib import Path

import pytest
from hydra.errors import MissingConfigException

from lightning_distlab.app.build import build
from lightning_distlab.app.messages import guarded, nearest, one_line
from lightning_distlab.strategies.child_processes import RankDiedError
from tests.app.compose import STRATEGIES, composed


def _line(*overrides: str, folder: Path = Path("unused")) -> str:
    with pytest.raises(Exception) as caught, composed(*overrides, folder=folder) as cfg:  # noqa: PT011 (any kind)
        build(cfg)
    line = one_line(caught.value)
    assert line is not None, f"no message for {caught.value!r}"
    assert "\n" not in line
    return line


def test_an_unknown_strategy_names_the_nearest():
    line = _line("strategy=dcg_ring")
    assert line.startswith("unknown strategy 'dcg_ring': did you mean dgc_ring")
    assert all(name in line for name in STRATEGIES)


def test_an_unknown_compressor_names_the_nearest():
    assert "did you mean sparse?" in _line("strategy=compressed", "strategy/compressor=sparce")


def test_density_out_of_range_names_key_value_and_rule():
    line = _line("strategy.compressor.density=5")
    assert line.startswith("strategy.compressor: ")
    assert "density" in line
    assert "5" in line


def test_a_mistyped_option_names_the_nearest():
    assert "did you mean density?" in _line("strategy.compressor.densty=0.1")


def test_an_equals_sign_in_a_path_asks_for_quotes():
    line = _line("ckpt_path=a/epoch=3.ckpt")
    assert "quote" in line
    assert "ckpt_path=a/epoch=3.ckpt" in line


@pytest.mark.parametrize(("there", "devices"), [(0, "auto"), (0, "2"), (2, "99"), (2, "[0,2]")])
def test_more_devices_than_exist_is_one_line(there, devices, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: there)
    line = _line("trainer=gpu", "strategy=lightning_ddp", f"trainer.devices={devices}")
    assert f"this machine has {there} CUDA devices" in line
    assert "trainer.accelerator=cpu" in line


def test_a_missing_checkpoint_is_found_missing_before_anything_starts():
    line = _line("ckpt_path=nowhere/last.ckpt")
    assert line.startswith("ckpt_path=nowhere/last.ckpt: there is no such file")


def test_a_group_set_to_null_says_how_to_leave_it_out():
    assert "~strategy" in _line("strategy=null")


def test_a_foreign_target_is_one_line():
    assert "allow-list" in _line("model._target_=os.getcwd")


def test_a_bug_keeps_its_traceback():
    def user_code():
        raise ValueError("a bug of the user's own")

    with pytest.raises(ValueError, match="own") as caught:
        user_code()
    assert one_line(caught.value) is None


def test_a_dead_rank_is_one_line():
    assert one_line(RankDiedError("rank 1 was killed")) == "rank 1 was killed"


def test_nearest_says_nothing_when_nothing_is_near():
    assert nearest("zzz", ["dgc_ring"]) == ""


def test_guarded_ends_a_mistake_with_one_line_and_code_1(capsys, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def main():
        assert os.environ["HYDRA_FULL_ERROR"] == "1"
        raise MissingConfigException("missing", missing_cfg_file="strategy/dgc", options=["dgc_ring", "ddp"])

    with pytest.raises(SystemExit) as ended:
        guarded(main)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: unknown strategy 'dgc': did you mean dgc_ring? Available: ddp, dgc_ring\n"
    assert "HYDRA_FULL_ERROR" not in os.environ


def test_guarded_shows_all_of_a_bug(capsys, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])

    def main():
        raise KeyError("bug")

    with pytest.raises(SystemExit):
        guarded(main)
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert "KeyError: 'bug'" in text


def test_guarded_lets_errors_through_when_asked(monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.delenv("DISTLAB_GUARDED", raising=False)

    def main():
        raise KeyError("bug")

    with pytest.raises(KeyError):
        guarded(main)
