import contextlib
import csv
import io
import pickle
import time

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from rich.console import Console

from lightning_distlab.callbacks import CommSummary
from lightning_distlab.callbacks.comm_report import CommReport, CountsCommunication
from lightning_distlab.exchange.ledger import Ledger

MIB = 2**20
STEP_S = 0.01


class Counting(SingleDeviceStrategy):
    """Claims that each step replaced 8 MiB by 2 MiB, of which rank 0 sent 3 MiB in 2 rounds of 1 message."""

    def __init__(self, ranks=4):
        super().__init__(torch.device("cpu"))
        self.ledger = Ledger()
        self.averaged_ranks = ranks

    def optimizer_step(self, *args, **kwargs):
        result = super().optimizer_step(*args, **kwargs)
        time.sleep(STEP_S)
        book = self.ledger
        book.steps += 1
        book.codec_s += 0.001
        book.exchange_s += 0.004
        if self.averaged_ranks > 1:
            book.dense_bytes += 8 * MIB
            book.payload_bytes += 2 * MIB
            for rank in range(self.averaged_ranks):
                account = book.account(rank, "replicate", "ring")
                account.bytes_sent += (3 + rank) * MIB
                account.header_bytes += 24
                account.messages += 1
                account.steps += 2
        return result

    def comm_summary(self):
        book = self.ledger
        return {
            "comm/dense_bytes": float(book.dense_bytes),
            "comm/payload_bytes": float(book.payload_bytes),
            "comm/payload_ratio": book.dense_bytes / book.payload_bytes if book.payload_bytes else 0.0,
            "comm/bytes_sent_per_rank": float(book.bytes_sent(0)),
            "comm/codec_ms": 1e3 * book.codec_s,
            "comm/exchange_ms": 1e3 * book.exchange_s,
            "comm/steps": float(book.steps),
            "comm/skipped_steps": float(book.skipped_steps),
        }


def fit(strategy, *, callbacks=(), logger=False, batches=4, model=None, **kwargs):
    """Returns the trainer and what was printed."""
    paper = io.StringIO()
    summary = CommSummary(Console(file=paper, width=100))
    trainer = pl.Trainer(
        **{"accelerator": "cpu", "strategy": strategy, "logger": logger, "enable_checkpointing": False,
           "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1,
           "limit_train_batches": batches, "limit_val_batches": 0, "log_every_n_steps": 2, "num_sanity_val_steps": 0,
           "callbacks": [summary, *callbacks]} | kwargs,
    )  # fmt: skip
    with contextlib.suppress(ZeroDivisionError):
        trainer.fit(model or BoringModel())
    return trainer, paper.getvalue()


def cells(text, key):
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in text.splitlines() if "│" in line]
    (row,) = [row for row in rows if row[0] == key]
    return row


def test_table_metrics_and_file_say_what_the_ledger_says(tmp_path):
    trainer, text = fit(Counting(), default_root_dir=tmp_path)
    assert cells(text, "dense gradients replaced")[1] == "32.000 MiB"
    assert cells(text, "payload")[1] == "8.000 MiB"
    assert cells(text, "payload ratio")[1] == "4.00x"
    assert cells(text, "sent per rank, with headers")[1] == "12.000 MiB"
    assert cells(text, "codec")[1] == "1.000 ms/step"
    assert cells(text, "exchange, exposed")[1] == "4.000 ms/step"
    assert cells(text, "skipped steps")[1] == "0"
    assert cells(text, "replicate") == ["replicate", "ring", "8", "4", "12.000", "counted"]
    assert "rank 0 of 4, 4 steps" in text
    assert "payload ratio = dense / payload" in text

    metrics = trainer.callback_metrics
    assert metrics["comm/steps"] == 4
    assert metrics["comm/bytes_sent_per_rank"] == 12 * MIB
    assert metrics["comm/mib_per_step"] == 3
    assert metrics["comm/codec_ms_per_step"] == pytest.approx(1)
    assert metrics["comm/step_ms"] >= 1e3 * STEP_S
    assert metrics["comm/share_of_step"] == pytest.approx(5 / metrics["comm/step_ms"].item(), rel=1e-4)

    rows = list(csv.DictReader((tmp_path / "communication.csv").open()))
    totals = {row["quantity"]: row["value"] for row in rows if row["axis"] == "all"}
    assert totals["comm/dense_bytes"] == str(32 * MIB)
    ring = {row["quantity"]: row["value"] for row in rows if (row["axis"], row["label"]) == ("replicate", "ring")}
    assert ring == {"steps": "8", "messages": "4", "bytes_sent": str(12 * MIB), "header_bytes": "96",
                    "bytes_received": "0", "modelled": "0"}  # fmt: skip


def test_at_most_three_numbers_on_the_bar_and_traffic_as_a_curve(tmp_path):
    logger = CSVLogger(tmp_path)
    bars = []

    class Look(Callback):
        def on_train_batch_end(self, trainer, *args):
            bars.append({k: v for k, v in trainer.progress_bar_metrics.items() if k.startswith("comm/")})

        on_train_epoch_end = on_train_batch_end

    fit(Counting(), logger=logger, callbacks=[Look()])
    assert bars[-1] == {"comm/payload_ratio": 4.0, "comm/mib_per_step": 3.0}
    rows = list(csv.DictReader((tmp_path / "lightning_logs/version_0/metrics.csv").open()))
    curve = [float(row["comm/bytes_sent_per_rank"]) / MIB for row in rows if row["comm/bytes_sent_per_rank"]]
    assert curve == [6.0, 12.0, 12.0], "after steps 2 and 4, and at the end"
    assert float(rows[-1]["comm/steps"]) == 4
    assert (tmp_path / "lightning_logs/version_0/communication.csv").exists()


def test_accumulation_counts_optimizer_steps_and_times_all_their_batches(tmp_path):
    class Slow(BoringModel):
        def training_step(self, batch, batch_idx):
            time.sleep(STEP_S)
            return super().training_step(batch, batch_idx)

    trainer, _ = fit(Counting(), batches=6, accumulate_grad_batches=3, default_root_dir=tmp_path, model=Slow())
    assert trainer.callback_metrics["comm/steps"] == 2
    assert trainer.callback_metrics["comm/step_ms"] >= 4e3 * STEP_S


def test_one_rank_says_that_nothing_is_communicated(tmp_path):
    _, text = fit(Counting(ranks=1), default_root_dir=tmp_path)
    assert "One rank: nothing is communicated." in text
    assert "MiB" not in text


def test_a_strategy_that_does_not_count_is_told_once(tmp_path, caplog):
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        trainer, text = fit("auto", default_root_dir=tmp_path)
    assert text == ""
    assert caplog.text.count("SingleDeviceStrategy does not count its communication") == 1
    assert not any(name.startswith("comm/") for name in trainer.callback_metrics)
    assert not (tmp_path / "communication.csv").exists()


def test_an_interrupted_run_is_reported_once(tmp_path):
    class Break(Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 3:
                raise ZeroDivisionError

    trainer, text = fit(Counting(), callbacks=[Break()], default_root_dir=tmp_path)
    assert "4, 3 steps" in text
    assert text.count("sent per rank") == 1
    assert trainer.callback_metrics["comm/steps"] == 3
    assert (tmp_path / "communication.csv").exists()


def test_fast_dev_run_writes_no_file(tmp_path):
    _, text = fit(Counting(), fast_dev_run=2, default_root_dir=tmp_path)
    assert "2 steps" in text
    assert not (tmp_path / "communication.csv").exists()


def test_a_second_fit_goes_on_counting_where_the_strategy_does(tmp_path):
    strategy, paper = Counting(), io.StringIO()
    summary = CommSummary(Console(file=paper, width=100))
    kwargs = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "default_root_dir": tmp_path, "limit_train_batches": 2,
    }  # fmt: skip
    trainer = pl.Trainer(strategy=strategy, callbacks=[summary], max_epochs=1, **kwargs)
    trainer.fit(BoringModel())
    first = trainer.callback_metrics["comm/step_ms"].item()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(BoringModel())
    assert trainer.callback_metrics["comm/steps"] == 4
    assert first / 3 < trainer.callback_metrics["comm/step_ms"] < first * 3, "time and steps cover the same batches"


def test_wandb_gets_numbers_and_a_table(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    logged = {}

    class Recording(WandbLogger):
        def log_metrics(self, metrics, step=None):
            logged.update(metrics)

    fit(Counting(), logger=Recording(save_dir=str(tmp_path)), default_root_dir=tmp_path / "elsewhere")
    assert logged["comm/payload_ratio"] == 4.0
    table = logged["comm/table"]
    assert table.columns == ["axis", "exchange", "steps", "messages", "MiB sent", "bytes are"]
    assert table.data == [["replicate", "ring", 8, 4, 12.0, "counted"]]
    assert (tmp_path / "communication.csv").exists()


def test_modelled_bytes_are_marked_and_the_callback_travels_to_spawned_processes():
    strategy = Counting()
    strategy.ledger.account(0, "replicate", "native:sum").modelled = True
    assert isinstance(strategy, CountsCommunication)
    report = CommReport.of(strategy, rank=0, ranks=2, step_s=0.0)
    assert report.rows() == [("replicate", "native:sum", 0, 0, 0.0, "formula")]
    assert report.metrics()["comm/share_of_step"] == 0
    pickle.loads(pickle.dumps(CommSummary()))
