"""A wheel in an environment of its own serves a user's scripts, wherever they lie."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.popen, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]

FIT = """
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Tiny(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(32, 16)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(64, 32)), batch_size=8)


def train(strategy):
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Tiny())
    if trainer.global_rank == 0:
        import lightning_distlab

        sent = trainer.strategy.comm_summary()["comm/bytes_sent_per_rank"]
        print("FROM", lightning_distlab.__file__, "STEPS", trainer.global_step, "SENT", sent > 0, flush=True)
"""

SCRIPTS = {
    "instance": """
        from fit import train
        from lightning_distlab.strategies import DGCStrategy

        if __name__ == "__main__":
            train(DGCStrategy(density=0.05, collective="gather"))
    """,
    "name": """
        import lightning_distlab
        from fit import train

        if __name__ == "__main__":
            train("dgc_ring")
    """,
    "hydra": """
        import hydra
        from fit import train
        from lightning_distlab.app import instantiate

        @hydra.main(version_base=None, config_path=".", config_name="mine")
        def main(config):
            train(instantiate(config.strategy))

        if __name__ == "__main__":
            main()
    """,
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that knows the wheel, and of this environment only what the wheel depends on."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("lightning_distlab-*.whl")
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=60)
    own = venv / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(own), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return own


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_wheel_serves_scripts_elsewhere(python: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "fit.py").write_text(FIT)
    (tmp_path / "mine.yaml").write_text(
        textwrap.dedent("""
        defaults:
          - strategy: dgc_ring
          - _self_
        hydra:
          searchpath: [pkg://lightning_distlab.conf]
    """)
    )
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPTS[kind]))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PL_GLOBAL_SEED")} | {"OMP_NUM_THREADS": "1"}
    command = [str(python), str(tmp_path / "script.py")]
    done = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FROM")]
    assert str(python.parents[1]) in line
    assert line.endswith("STEPS 3 SENT True")
