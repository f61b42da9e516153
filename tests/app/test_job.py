import json
import os

import pytest
import torch.distributed as dist

from lightning_distlab.app.job import DONE, Job, JobResult, run_job
from lightning_distlab.strategies.child_processes import RankDiedError
from tests.app.compose import composed


def _run(task, folder, *overrides):
    with composed("print_config=false", *overrides, folder=folder) as cfg:
        return run_job(task, cfg)


def _good(cfg, job):
    job.folder.mkdir(parents=True, exist_ok=True)
    return JobResult(metrics={"val/acc": 0.5})


def test_returns_the_optimized_metric_and_leaves_the_mark(tmp_path):
    assert _run(_good, tmp_path) == 0.5
    assert json.loads((tmp_path / DONE).read_text())["metrics"] == {"val/acc": 0.5}


def test_a_finished_job_is_skipped_only_when_asked_and_only_if_it_is_the_same(tmp_path):
    runs = []

    def task(cfg, job):
        runs.append(cfg.seed)
        return _good(cfg, job)

    _run(task, tmp_path)
    assert _run(task, tmp_path, "skip_done=true") == 0.5
    assert runs == [0]
    _run(task, tmp_path)
    assert runs == [0, 0]
    _run(task, tmp_path, "skip_done=true", "seed=1")
    assert runs == [0, 0, 1]


def test_a_failed_job_leaves_its_error_and_no_mark(tmp_path):
    _run(_good, tmp_path)

    def bad(cfg, job):
        raise KeyError("what went wrong")

    with pytest.raises(KeyError):
        _run(bad, tmp_path)
    text = (tmp_path / "error.log").read_text()
    assert "what went wrong" in text
    assert "in bad" in text
    assert not (tmp_path / DONE).exists()


def test_a_later_success_takes_the_error_away(tmp_path):
    with pytest.raises(RankDiedError):
        _run(lambda cfg, job: (_ for _ in ()).throw(RankDiedError("rank 1 was killed")), tmp_path)
    _run(_good, tmp_path)
    assert not (tmp_path / "error.log").exists()


def test_an_unknown_optimized_metric_names_those_there_are(tmp_path):
    with pytest.raises(ValueError, match=r"optimized_metric='val/f1' was not logged; logged were val/acc"):
        _run(_good, tmp_path, "optimized_metric=val/f1")
    assert not (tmp_path / DONE).exists()
    assert _run(_good, tmp_path, "optimized_metric=null") is None


def test_a_failing_job_leaves_no_process_group(tmp_path, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def task(cfg, job):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        _run(task, tmp_path)
    assert not dist.is_initialized()


def test_fingerprint_ignores_what_changes_no_result(tmp_path):
    def of(*overrides):
        with composed(*overrides, folder=tmp_path) as cfg:
            return Job.of(cfg).fingerprint

    assert of() == of("skip_done=true") == of("tags=[a]")
    assert of() != of("seed=1")
    assert of() != of("strategy.compressor.density=0.5")


def test_print_config_shows_no_secret_and_no_environment(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HUB_TOKEN", "from-the-environment")
    secrets = ["+hub.api_key=abc123secretvalue", "+hub.url='${oc.env:HUB_TOKEN}'", "+hub.name=visible"]
    with composed("print_config=true", *secrets, folder=tmp_path) as cfg:
        run_job(_good, cfg)
    shown = capsys.readouterr().out
    assert "visible" in shown
    assert "abc123secretvalue" not in shown
    assert "from-the-environment" not in shown
    assert os.environ["HUB_TOKEN"] == "from-the-environment"
