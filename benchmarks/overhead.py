"""What our machinery costs when nothing is compressed: step time against Lightning's DDP, side by side.

    python benchmarks/overhead.py --json overhead.json

Two gloo ranks, one thread each, train the same network under four strategies in the same pair of processes:

- ours: `CompressedStrategy()`, nothing compressed over the backend's all-reduce;
- lean: Lightning's `DDPStrategy` with its per-batch SIGTERM broadcast removed;
- matched: lean, without the broadcast of buffers, which ours leaves out too;
- stock: `DDPStrategy` as it is.

Each has a Trainer of its own, and all four fits are open at once over one process group: each runs in a thread, and
only the one that holds the turn moves, for a block of steps of Lightning's own training loop. A pair is one block of
each in ABBA order, so that drift of the machine's speed cancels. Reported: the median over pairs of ours / lean, the
upper end of its 95 % bootstrap interval, the medians of stock / lean and ours / matched, and ours / lean in processor
seconds of both ranks, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import random
import socket
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.strategies import DDPStrategy, Strategy
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_distlab.strategies import CompressedStrategy
from recipes.vision.resnet_cifar import CifarResNet

WARM_UP_STEPS = 5
"""DDP rebuilds its buckets after the first of them."""

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ours": CompressedStrategy,
    "lean": DDPStrategy,
    "matched": lambda: DDPStrategy(broadcast_buffers=False),
    "stock": DDPStrategy,
}


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


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet8": lambda: CifarResNet(8),
    "resnet20": lambda: CifarResNet(20),
    "mlp": _mlp,
}


class Network(pl.LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = NETWORKS[name]()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Batches(IterableDataset[tuple[Tensor, Tensor]]):
    """Ready batches without an end, so that no epoch ends inside a block."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = [(torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))) for _ in range(4)]
        return itertools.cycle(batches)


class Lane(pl.Callback):
    """One fit that moves only while `run` is called; in between its thread waits at the start of a batch."""

    def __init__(self, kind: str, network: str) -> None:
        self.kind, self.network = kind, network
        self._left, self._started = WARM_UP_STEPS, (0.0, 0.0)
        self._seconds = (0.0, 0.0)
        self._turn, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._fit, daemon=True)
        self._thread.start()

    def run(self, steps: int) -> tuple[float, float]:
        """Wall and processor seconds per step of a block; the first call warms up instead."""
        self._left = max(steps, self._left)
        count = self._left
        self._turn.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error
        return self._seconds[0] / count, self._seconds[1] / count

    def close(self) -> None:
        self.trainer.should_stop = True
        self._left = 1
        self._turn.release()
        self._thread.join()

    def _fit(self) -> None:
        self._turn.acquire()
        try:
            self.trainer = pl.Trainer(
                strategy=STRATEGIES[self.kind](),
                devices=2,
                accelerator="cpu",
                max_steps=10**9,
                callbacks=[self],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            self.trainer.fit(Network(self.network), DataLoader(Batches(), batch_size=None))
        except BaseException as error:  # raised again in the main thread
            self._error = error
        self._done.release()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.kind in ("lean", "matched"):
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if self._left == 0:
            wall, processor = self._started
            self._seconds = time.perf_counter() - wall, time.process_time() - processor
            self._done.release()
            self._turn.acquire()
            dist.barrier()
            self._started = time.perf_counter(), time.process_time()
        self._left -= 1


def rank(index: int, port: int, options: argparse.Namespace, network: str, out: str) -> None:
    """All blocks of one rank, which writes its times."""
    os.environ.update(
        LOCAL_RANK=str(index), WORLD_SIZE="2", NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel("ERROR")
    warnings.filterwarnings("ignore")
    lanes = {kind: Lane(kind, network) for kind in STRATEGIES}
    for lane in lanes.values():
        lane.run(WARM_UP_STEPS)
    rows = []
    pairs = range(options.pairs)
    for pair in track(pairs, description=network) if index == 0 else pairs:
        order = list(lanes) if pair % 2 == 0 else list(reversed(lanes))
        times = {kind: lanes[kind].run(options.steps) for kind in order}
        rows.append({kind: times[kind] for kind in lanes})
    for lane in lanes.values():
        lane.close()
    Path(f"{out}.{index}").write_text(json.dumps(rows))


def measure(network: str, options: argparse.Namespace) -> dict[str, float | str]:
    """One network's ratios."""
    out = Path(f"overhead-{os.getpid()}.tmp")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mp.start_processes(rank, (port, options, network, str(out)), nprocs=2, start_method="fork")
    files = [Path(f"{out}.{index}") for index in range(2)]
    rows, others = (json.loads(file.read_text()) for file in files)
    for file in files:
        file.unlink()

    def ratios(first: str, second: str) -> list[float]:
        return [row[first][0] / row[second][0] for row in rows]

    ours = ratios("ours", "lean")
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(ours, k=len(ours))) for _ in range(2000))
    processor = [
        (row["ours"][1] + other["ours"][1]) / (row["lean"][1] + other["lean"][1])
        for row, other in zip(rows, others, strict=True)
    ]
    return {
        "network": network,
        "pairs": len(rows),
        "lean_ms": round(1e3 * statistics.median(row["lean"][0] for row in rows), 2),
        "step_ratio": round(statistics.median(ours), 4),
        "step_ratio_high": round(medians[int(0.975 * len(medians))], 4),
        "stock_step_ratio": round(statistics.median(ratios("stock", "lean")), 4),
        "matched_step_ratio": round(statistics.median(ratios("ours", "matched")), 4),
        "processor_ratio": round(statistics.median(processor), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=48)
    parser.add_argument("--steps", type=int, default=5, help="steps of a block")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [measure(network, options) for network in options.networks]
    columns = (
        "network",
        "pairs",
        "lean ms",
        "ours/lean",
        "95 % bound",
        "stock/lean",
        "ours/matched",
        "CPU s, ours/lean",
    )
    table = Table(*columns, title="Time per step")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
