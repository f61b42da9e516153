import json
import math

import pytest

from lightning_distlab.report.metrics import lower_is_better
from lightning_distlab.report.runs import Spread, find_runs, group_runs, read_curve
from tests.report.folders import write_run


def test_seeds_become_the_spread(tmp_path):
    for seed, acc in enumerate((0.90, 0.92, 0.97)):
        write_run(tmp_path / str(seed), "dgc_ring", seed, acc)
    write_run(tmp_path / "other", "ddp", 0, 0.95)
    ddp, dgc = group_runs(find_runs([tmp_path]))
    assert (ddp.strategy, len(ddp.runs), dgc.strategy, len(dgc.runs)) == ("ddp", 1, "dgc_ring", 3)
    assert ddp.spread("val/acc", "last") == Spread(0.95, None, 1)
    spread = dgc.spread("val/acc", "last")
    assert spread is not None
    assert math.isclose(spread.mean, 0.93)
    assert math.isclose(spread.std, math.sqrt((0.03**2 + 0.01**2 + 0.04**2) / 2))
    assert spread.n == 3


def test_runs_with_other_settings_are_no_seeds_of_each_other(tmp_path):
    for seed in (0, 1):
        for density in (0.01, 0.1):
            write_run(tmp_path / f"{seed}{density}", "dgc_ring", seed, 0.9, **{"strategy.density": density})
    groups = group_runs(find_runs([tmp_path]))
    assert [group.label for group in groups] == ["dgc_ring density=0.01", "dgc_ring density=0.1"]
    assert [len(group.runs) for group in groups] == [2, 2]


def test_the_way_of_starting_is_no_setting(tmp_path):
    for seed, method in enumerate(("popen", "fork")):
        write_run(tmp_path / method, "ddp", seed, 0.9, **{"strategy.start_method": method})
    (group,) = group_runs(find_runs([tmp_path]))
    assert group.label == "ddp"
    assert len(group.runs) == 2


def test_a_run_below_two_given_folders_counts_once(tmp_path):
    write_run(tmp_path / "a" / "b", "ddp", 0, 0.9)
    assert len(find_runs([tmp_path, tmp_path / "a"])) == 1


def test_what_is_no_number_is_left_out(tmp_path):
    write_run(tmp_path, "lightning_ddp", 0, 0.9, sent=None)
    (run,) = find_runs([tmp_path])
    assert "comm/payload_ratio" not in run.numbers
    assert run.last == {"val/acc": 0.9}  # NaN is written as text
    assert run.numbers["steps"] == 100


def test_evaluations_are_left_out(tmp_path):
    write_run(tmp_path, "ddp", 0, 0.9)
    content = json.loads((tmp_path / "summary.json").read_text())
    (tmp_path / "summary.json").write_text(json.dumps(content | {"job_type": "eval"}))
    with pytest.raises(ValueError, match="no run in"):
        find_runs([tmp_path])


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is no folder"):
        find_runs([tmp_path / "nowhere"])


def test_curve_keeps_only_rows_that_have_the_metric(tmp_path):
    write_run(tmp_path, "ddp", 0, 0.9)
    (run,) = find_runs([tmp_path])
    assert read_curve(run, "val/acc") == [(49.0, pytest.approx(0.8)), (99.0, 0.9)]
    assert read_curve(run, "val/f1") == []


@pytest.mark.parametrize("name", ["val/loss", "train/loss_step", "test/perplexity", "comm/codec_ms", "bytes", "wer"])
def test_smaller_is_better(name):
    assert lower_is_better(name)


@pytest.mark.parametrize("name", ["val/acc", "test/f1", "lossless_ratio", "comm/payload_ratio", "arms"])
def test_larger_is_better(name):
    assert not lower_is_better(name)
