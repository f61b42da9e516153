import pickle
import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import RichProgressBar

from lightning_distlab.callbacks.line_progress import LineProgress, progress_for_output


class _Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch, batch_idx):
        self.log("train/loss", self.weight.sum(), prog_bar=True)
        return self.weight.sum()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(3, 1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.25)


def _fit(capsys, tmp_path, callback):
    trainer = pl.Trainer(
        max_epochs=2,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(_Line())
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]


def test_one_line_per_epoch_with_steps_and_metrics(capsys, tmp_path):
    first, second = _fit(capsys, tmp_path, LineProgress())
    assert first.startswith("epoch 1/2  step 3  ")
    assert first.endswith("train/loss 0.5")
    assert second.startswith("epoch 2/2  step 6  ")
    assert second.endswith("train/loss -0.25")


def test_ranks_above_0_print_nothing(capsys, tmp_path):
    progress = LineProgress()
    progress.disable()
    assert _fit(capsys, tmp_path, progress) == []


def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert isinstance(progress_for_output(), RichProgressBar)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert isinstance(progress_for_output(), LineProgress)


def test_it_travels_to_spawned_ranks():
    assert isinstance(pickle.loads(pickle.dumps(LineProgress())), LineProgress)
