import pytest
import wandb

from lightning_distlab.report.runs import find_runs
from lightning_distlab.report.wandb_files import find_wandb_files, read_wandb_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a run that left nothing but W&B's offline file."""
    folder = tmp_path_factory.mktemp("run")
    run = wandb.init(
        project="p",
        name="dgc_ring-s3",
        group="dgc_ring x digits",
        job_type="train",
        tags=["a", "b"],
        dir=str(folder),
        mode="offline",
        config={"strategy.name": "dgc_ring", "recipe": "digits", "world_size": 2, "seed": 3, "strategy.density": 0.01},
        settings=wandb.Settings(x_disable_meta=True, silent=True),
    )
    for step in range(3):
        run.log({"val/acc": 0.5 + 0.1 * step})
    run.summary.update({"last/val/acc": 0.7, "best/val/acc": 0.8, "comm/payload_ratio": 50.0, "steps": 3})
    run.finish()
    return folder


def test_everything_comes_back_from_the_file(folder):
    (path,) = find_wandb_files(folder)
    run = read_wandb_run(path, history=True)
    assert (run.name, run.group, run.job_type, set(run.tags)) == (
        "dgc_ring-s3",
        "dgc_ring x digits",
        "train",
        {"a", "b"},
    )
    assert run.config["strategy.density"] == 0.01
    assert run.summary["best/val/acc"] == 0.8
    assert [row["val/acc"] for row in run.history] == pytest.approx([0.5, 0.6, 0.7])
    assert run.exit_code == 0


def test_comparison_falls_back_to_the_file(folder):
    (run,) = find_runs([folder])
    assert (run.strategy, run.recipe, run.world_size, run.seed) == ("dgc_ring", "digits", 2, 3)
    assert run.last == {"val/acc": 0.7}
    assert run.best == {"val/acc": 0.8}
    assert run.numbers["comm/payload_ratio"] == 50.0


def test_a_broken_file_is_named(tmp_path):
    path = tmp_path / "run-x.wandb"
    path.write_bytes(b"no run")
    with pytest.raises(ValueError, match=r"run-x\.wandb"):
        read_wandb_run(path)
