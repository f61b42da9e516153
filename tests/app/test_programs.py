"""Whole programs: `train.py` and `eval.py` as a user starts them. Few, for each takes seconds."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_distlab.report.wandb_files import find_wandb_files, read_wandb_run
from tests.app.compose import ROOT

pytestmark = [pytest.mark.popen, pytest.mark.timeout(300)]
SHORT = ("trainer.max_epochs=1", "trainer.limit_train_batches=6", "data.num_workers=0")


def _environment(outputs: Path) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HYDRA", "WANDB", "PL_"))}
    return env | {"DISTLAB_OUTPUTS": str(outputs), "OMP_NUM_THREADS": "1"}


def _run(outputs: Path, *arguments: str, launcher: tuple[str, ...] = (sys.executable,), code: int = 0) -> str:
    command = [*launcher, *arguments]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=_environment(outputs),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=150)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code, text
    return text


def _jobs(outputs: Path) -> list[Path]:
    return sorted(path.parent for path in outputs.rglob("summary.json"))


def _summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_train_evaluate_and_resume_in_one_folder_each(tmp_path):
    _run(tmp_path, "train.py", "strategy=dgc_ring", *SHORT)
    (folder,) = _jobs(tmp_path)
    assert list((tmp_path / "train" / "runs").iterdir()) == [folder]
    assert {"rank1.log", "train.log", "DONE", ".hydra", "csv", "wandb"} <= {path.name for path in folder.iterdir()}
    summary = _summary(folder)
    assert (summary["strategy"], summary["world_size"], summary["seed"], summary["steps"]) == ("dgc_ring", 2, 0, 6)
    assert {"val/acc", "test/acc"} <= set(summary["last"]) & set(summary["best"])
    assert summary["comm/payload_ratio"] > 100
    assert summary["comm/bytes_sent_per_rank"] > 0
    last = folder / "checkpoints" / "last.ckpt"

    _run(tmp_path, "eval.py", f"ckpt_path={next((folder / 'checkpoints').glob('epoch*.ckpt'))}")
    (evaluation,) = _jobs(tmp_path / "eval")
    assert _summary(evaluation)["last"]["test/acc"] == pytest.approx(summary["last"]["test/acc"], abs=1e-6)
    assert read_wandb_run(*find_wandb_files(evaluation)).job_type == "eval"

    # resumed by forked workers, from what started programs have saved
    resumed = (
        "trainer.max_epochs=2",
        "trainer.limit_train_batches=6",
        f"ckpt_path={last}",
        "strategy.start_method=fork",
    )
    text = _run(tmp_path, "train.py", "strategy=dgc_ring", *resumed)
    assert "epoch 2/2" in text
    assert "epoch 1/2" not in text
    (second,) = [job for job in _jobs(tmp_path / "train") if job != folder]
    _check_workers(second, steps=12)


def _check_workers(folder: Path, steps: int) -> None:
    """A job whose ranks were forked or spawned is as complete as any."""
    summary = _summary(folder)
    assert (summary["world_size"], summary["steps"]) == (2, steps)
    assert "test/acc" in summary["last"]
    assert summary["comm/payload_ratio"] > 100
    (path,) = find_wandb_files(folder)
    assert read_wandb_run(path).summary["last/test/acc"] == pytest.approx(summary["last"]["test/acc"])


def test_a_sweep_over_devices_survives_a_failing_job(tmp_path):
    text = _run(
        tmp_path, "train.py", "-m", "strategy=dgc_ring", "trainer.devices=2,-3,1", *SHORT, "tags=[sweep]", code=1
    )
    (sweep,) = (tmp_path / "train" / "multiruns").iterdir()
    assert sorted(path.name for path in sweep.iterdir() if path.is_dir()) == ["0", "1", "2"]
    done = {path.parent.name for path in sweep.rglob("DONE")}
    failed = {path.parent.name for path in sweep.rglob("error.log")}
    assert (done, failed) == ({"0", "2"}, {"1"})
    assert "should be an int > 0" in text.splitlines()[-1]
    for job in sorted(done):
        summary = _summary(sweep / job)
        (path,) = find_wandb_files(sweep / job)
        run = read_wandb_run(path)
        assert run.name == f"{summary['strategy']}-s0"
        assert run.group == f"{summary['strategy']} x digits_mlp"
        assert (run.job_type, run.tags, run.exit_code) == ("train", ("sweep",), 0)
        assert run.config["strategy.name"] == summary["strategy"]
        assert run.config["world_size"] == summary["world_size"] == (2 if job == "0" else 1)
        assert run.summary["best/val/acc"] == pytest.approx(summary["best"]["val/acc"])
        assert run.summary["last/test/acc"] == pytest.approx(summary["last"]["test/acc"])


def test_torchrun_makes_one_folder(tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    _run(tmp_path, "train.py", "strategy=lightning_ddp", *SHORT, launcher=torchrun)
    (folder,) = (tmp_path / "train" / "runs").iterdir()
    assert _summary(folder)["world_size"] == 2
    assert len(find_wandb_files(folder)) == 1
    assert (folder / "train-rank1.log").exists()


def test_spawned_workers_finish_the_whole_job(tmp_path):
    _run(tmp_path, "train.py", "strategy=dgc_ring", "strategy.start_method=spawn", *SHORT)
    (folder,) = _jobs(tmp_path)
    _check_workers(folder, steps=6)


def test_a_killed_rank_is_named_and_the_rest_ends(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "train.py", "strategy=dgc_ring", "trainer.max_epochs=10000"],
        cwd=ROOT,
        env=_environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 90
        while not list(tmp_path.rglob("last.ckpt")) and time.monotonic() < deadline:
            time.sleep(0.3)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (victim,) = [pid for pid in children if "hydra.job.name=rank1" in Path(f"/proc/{pid}/cmdline").read_text()]
        killed_at = time.monotonic()
        os.kill(int(victim), signal.SIGKILL)
        text, _ = process.communicate(timeout=60)
        assert time.monotonic() - killed_at < 30
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 1
    assert f"rank 1 (process {victim}) was killed by SIGKILL" in text.splitlines()[-1]
    assert "last checkpoint" in text


def test_a_mistake_ends_in_one_line_before_anything_is_written(tmp_path):
    text = _run(tmp_path, "train.py", "strategy=dcg_ring", code=1)
    assert text.startswith("error: unknown strategy 'dcg_ring': did you mean dgc_ring")
    assert text.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
