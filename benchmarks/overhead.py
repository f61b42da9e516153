"""What our machinery costs when nothing is compressed: step time against Lightning's DDP, side by side.

    python benchmarks/overhead.py --json overhead.json

Two gloo ranks, one thread each, train the same network with three strategies in turn, in the same pair of processes:

- ours: `CompressedStrategy()`, nothing compressed over the backend's all-reduce;
- lean: Lightning's `DDPStrategy` with its per-batch SIGTERM broadcast removed;
- stock: `DDPStrategy` as it is.

A block is a fit of some steps of which the first few are not timed. Blocks alternate as ours, lean, lean, ours, with a
stock block beside each pair, so that drift of the machine's speed cancels. Reported: the median over pairs of ours /
lean, the upper end of its 95 % bootstrap interval, and the median of stock / lean.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.multiprocessing as mp
from lightning.pytorch.strategies import DDPStrategy, Strategy
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_distlab.strategies import CompressedStrategy
from recipes.vision.resnet_cifar import CifarResNet

UNTIMED = 3


class Network(pl.LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = CifarResNet(8) if name == "resnet8" else _mlp()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def _mlp() -> nn.Module:
    """3.7 million parameters in eight tensors."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(3072, 768),
        nn.ReLU(),
        nn.Linear(768, 1024),
        nn.ReLU(),
        nn.Linear(1024, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


class Stopwatch(pl.Callback):
    """Seconds per step of a fit, the first steps apart; takes the broadcast out where asked."""

    def __init__(self, lean: bool) -> None:
        self.lean, self.started, self.seconds = lean, 0.0, 0.0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.lean:
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if batch_idx == UNTIMED:
            torch.distributed.barrier()
            self.started = time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.distributed.barrier()
        self.seconds = (time.perf_counter() - self.started) / (trainer.global_step - UNTIMED)


def block(kind: str, network: str, steps: int, data: TensorDataset) -> float:
    """Seconds per step of one short fit."""
    strategy: Strategy = CompressedStrategy() if kind == "ours" else DDPStrategy()
    watch = Stopwatch(lean=kind == "lean")
    trainer = pl.Trainer(
        strategy=strategy,
        devices=2,
        accelerator="cpu",
        max_steps=steps,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Network(network), DataLoader(data, batch_size=32))
    return watch.seconds


def rank(index: int, port: int, options: argparse.Namespace, network: str, out: str) -> None:
    """All blocks of one rank; rank 0 writes the times."""
    os.environ.update(
        LOCAL_RANK=str(index), WORLD_SIZE="2", NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        __import__("logging").getLogger(name).setLevel("ERROR")
    warnings.filterwarnings("ignore")
    torch.manual_seed(index)
    data = TensorDataset(torch.randn(32 * options.steps, 3, 32, 32), torch.randint(0, 10, (32 * options.steps,)))
    for kind in ("ours", "lean", "stock"):
        block(kind, network, UNTIMED + 2, data)
    rows = []
    pairs = range(options.pairs)
    for pair in track(pairs, description=network) if index == 0 else pairs:
        order = ("ours", "lean") if pair % 2 == 0 else ("lean", "ours")
        row = {kind: block(kind, network, options.steps, data) for kind in order}
        row["stock"] = block("stock", network, options.steps, data)
        rows.append(row)
    if index == 0:
        Path(out).write_text(json.dumps(rows))


def measure(network: str, options: argparse.Namespace) -> dict[str, float | str]:
    """One network's ratios."""
    out = Path(f"overhead-{os.getpid()}.tmp")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mp.start_processes(rank, (port, options, network, str(out)), nprocs=2, start_method="fork")
    rows = json.loads(out.read_text())
    out.unlink()
    ratios = [row["ours"] / row["lean"] for row in rows]
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "network": network,
        "pairs": len(rows),
        "lean_ms": round(1e3 * statistics.median(row["lean"] for row in rows), 2),
        "step_ratio": round(statistics.median(ratios), 4),
        "step_ratio_high": round(medians[int(0.975 * len(medians))], 4),
        "stock_step_ratio": round(statistics.median(row["stock"] / row["lean"] for row in rows), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=13, help=f"steps a block, the first {UNTIMED} untimed")
    parser.add_argument("--networks", nargs="+", default=["resnet8", "mlp"], choices=["resnet8", "mlp"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [measure(network, options) for network in options.networks]
    table = Table("network", "pairs", "lean ms/step", "ours / lean", "95 % bound", "stock / lean", title="Overhead")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
