"""How much memory each strategy adds: live tensor bytes on a rank against Lightning's DDP, per byte of parameters.

    python benchmarks/memory.py --json memory.json

Two gloo ranks train the same network with SGD and momentum. torch's profiler reports each allocation and release of its
allocator, in C++ and in Python, from before the strategy's `setup` on, so that the running sum is exact: between two
steps (gradients, optimizer state, memories, scratch) and at its peak inside a step. The baseline is `DDPStrategy` with
`gradient_as_bucket_view=True`, the leaner of its two forms. Rows: `strategy, parameters_bytes, bucket_bytes,
between_steps, peak`, the last two in bytes above the baseline.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from lightning_distlab.strategies import CompressedStrategy, DGCStrategy, SparseStrategy

WIDTH, LAYERS = 256, 12
STEPS = 6
"""DDP rebuilds its buckets after the first; the last two are measured."""
BUCKET_MB = 0.5
OPTIONS: dict[str, Any] = {"start_method": "fork", "bucket_cap_mb": BUCKET_MB}

BASELINE = "baseline"
STRATEGIES: dict[str, tuple[Callable[[], Strategy], float]] = {
    BASELINE: (lambda: DDPStrategy(gradient_as_bucket_view=True, **OPTIONS), 0.0),
    "none": (lambda: CompressedStrategy(**OPTIONS), 0.0),
    "none after_backward": (lambda: CompressedStrategy(overlap="after_backward", **OPTIONS), 0.0),
    "sparse": (lambda: SparseStrategy(0.001, **OPTIONS), 0.0),
    "dgc": (lambda: DGCStrategy(0.001, **OPTIONS), 0.0),
    "dgc after_backward": (lambda: DGCStrategy(0.001, overlap="after_backward", **OPTIONS), 0.0),
    "dgc weight decay": (lambda: DGCStrategy(0.001, **OPTIONS), 1e-4),
    "dgc dense": (lambda: DGCStrategy(1.0, **OPTIONS), 0.0),
}
"""Strategy and weight decay of SGD."""


class Network(pl.LightningModule):
    """A stack of square layers, whose activations are small beside its parameters."""

    def __init__(self, weight_decay: float) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.weight_decay = weight_decay

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9, weight_decay=self.weight_decay)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(4 * STEPS, WIDTH)), batch_size=2)


class Meter(pl.Callback):
    """Follows the allocator on rank 0 and writes (bytes between steps, peak inside a step)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.starts: list[int] = []

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        if trainer.global_rank == 0:
            self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
            self.profiler.start()

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self.starts.append(time.time_ns())

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_rank != 0:
            return
        self.profiler.stop()
        assert self.profiler.profiler is not None
        assert self.profiler.profiler.kineto_results is not None
        events = [e for e in self.profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        live = list(accumulate(event.nbytes() for event in events))
        first, last = self.starts[-2:]
        between = next(n for n, e in zip(reversed(live), reversed(events), strict=True) if e.start_ns() < last)
        peak = max(n for n, e in zip(live, events, strict=True) if first <= e.start_ns() < last)
        self.path.write_text(json.dumps([between, peak]))


def measure(name: str, runs: int = 3) -> tuple[int, int]:
    """Bytes that live between steps, and at most inside a step, on rank 0; parameters and what was before left out.

    The least of several runs: now and then a thread of the backend is the last to let go of DDP's first buckets, and a
    release outside the profiled threads is not reported.
    """
    between, peak = zip(*(_measure_once(name) for _ in range(runs)), strict=True)
    return min(between), min(peak)


def _measure_once(name: str) -> tuple[int, int]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    strategy, weight_decay = STRATEGIES[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "live.json"
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy=strategy(), max_steps=STEPS, callbacks=[Meter(path)], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(Network(weight_decay))
        between, peak = json.loads(path.read_text())
    return between, peak


def compare(names: list[str], base: tuple[int, int]) -> list[dict[str, Any]]:
    """One row per strategy: bytes above those of the baseline."""
    parameters = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
    rows = []
    for name in names:
        between, peak = measure(name)
        rows.append({
            "strategy": name,
            "parameters_bytes": parameters,
            "bucket_bytes": int(BUCKET_MB * 2**20),
            "between_steps": between - base[0],
            "peak": peak - base[1],
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [name for name in STRATEGIES if name != BASELINE]
    parser.add_argument("--strategies", nargs="+", default=known, choices=known)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = compare(options.strategies, measure(BASELINE))
    table = Table("strategy", "between steps", "at the peak", title="Bytes above DDP, in units of the parameters")
    for row in rows:
        size = row["parameters_bytes"]
        table.add_row(row["strategy"], f"{row['between_steps'] / size:+.3f}", f"{row['peak'] / size:+.3f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
