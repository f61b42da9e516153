"""What happens when a rank is killed, asked to stop, or differs from the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim import SGD

from lightning_distlab.strategies import CompressedStrategy, DGCStrategy
from tests.strategies.fits import Small, fit, same_bits


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 67), nn.Tanh(), nn.Linear(67, 1))


def module() -> Small:
    return Small(net, lambda p: SGD(p, lr=0.05, momentum=0.9), dtype=torch.float32)


class SignalAt(pl.Callback):
    """Sends a signal to one rank before a batch; each rank notes the batches it has done."""

    def __init__(self, folder: Path, signum: int, rank: int = 1, batch: int = 4) -> None:
        self.folder, self.signum, self.rank, self.batch = folder, signum, rank, batch

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.batch and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.signum)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        (self.folder / f"done{trainer.global_rank}").write_text(str(trainer.global_step))


class Every(pl.callbacks.ModelCheckpoint):
    """A checkpoint after each second step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(dirpath=folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)


@pytest.mark.parametrize("make", [
    lambda: DGCStrategy(0.05, start_method="fork", timeout_s=20),
    lambda: DGCStrategy(0.05, start_method="fork", timeout_s=20, overlap="after_backward"),
    lambda: CompressedStrategy(start_method="fork", timeout_s=20),
], ids=["dgc bucket", "dgc after_backward", "native"])  # fmt: skip
def test_sigkill_of_a_forked_rank_names_it_and_the_last_checkpoint_resumes(tmp_path: Path, make: Any) -> None:
    callbacks = (SignalAt(tmp_path, signal.SIGKILL), Every(tmp_path))
    started = time.monotonic()
    with pytest.raises(Exception, match=r"(?i)rank 1 .*(SIGKILL|lost)"):
        fit(tmp_path, module(), make(), 2, callbacks=callbacks, enable_checkpointing=True)
    assert time.monotonic() - started < 25
    done = fit(tmp_path / "again", module(), make(), 2, steps=8, resume=tmp_path / "step=4.ckpt")
    assert done.ranks[0]["global_step"] == 8


@pytest.mark.parametrize("overlap", ["bucket", "after_backward"])
@pytest.mark.parametrize("asked", [0, 1])
def test_sigterm_to_one_rank_stops_all_after_the_same_step(tmp_path: Path, overlap: Any, asked: int) -> None:
    callbacks = (SignalAt(tmp_path, signal.SIGTERM, rank=asked), Every(tmp_path))
    strategy = DGCStrategy(0.05, start_method="fork", overlap=overlap)
    with pytest.raises(BaseException) as stopped:  # noqa: PT011  SystemExit, or the launcher's report of it
        fit(tmp_path, module(), strategy, 2, callbacks=callbacks, enable_checkpointing=True)
    assert "SIGKILL" not in str(stopped.value)
    assert [(tmp_path / f"done{rank}").read_text() for rank in range(2)] == ["5", "5"]
    again = DGCStrategy(0.05, start_method="fork", overlap=overlap)
    done = fit(tmp_path / "again", module(), again, 2, steps=8, resume=tmp_path / "step=4.ckpt")
    assert same_bits(done.ranks[0]["weights"], done.ranks[1]["weights"])


class Different(Small):
    """Rank 1 has a wider layer."""

    def __init__(self) -> None:
        super().__init__(net, dtype=torch.float32)

    def configure_model(self) -> None:
        if self.global_rank == 1:
            self.net = nn.Sequential(nn.Linear(5, 99), nn.Tanh(), nn.Linear(99, 1))


@pytest.mark.parametrize("overlap", ["bucket", "after_backward"])
def test_ranks_with_different_models_are_told(tmp_path: Path, overlap: Any) -> None:
    strategy = DGCStrategy(0.05, start_method="fork", timeout_s=20, overlap=overlap)
    started = time.monotonic()
    with pytest.raises(Exception, match=r"(?i)differ|not match|same model"):
        fit(tmp_path, Different(), strategy, 2, steps=3)
    assert time.monotonic() - started < 25


@pytest.mark.popen
@pytest.mark.timeout(120)
def test_sigkill_of_a_started_rank_names_it(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(f"""
        import signal
        from pathlib import Path
        import lightning.pytorch as pl
        from lightning_distlab.strategies import DGCStrategy
        from tests.strategies.test_failures import Every, SignalAt, module
        folder = Path({str(tmp_path)!r})
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy=DGCStrategy(0.05, timeout_s=20), max_steps=20, logger=False,
            callbacks=[SignalAt(folder, signal.SIGKILL), Every(folder)], enable_progress_bar=False,
        )
        trainer.fit(module())
    """)
    )
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode != 0
    assert "rank 1" in done.stderr
    assert "was killed by SIGKILL" in done.stderr
    assert torch.load(tmp_path / "step=4.ckpt", weights_only=True)["global_step"] == 4
