"""Machines, programs and their number."""

from __future__ import annotations

import functools
import inspect
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.conformance.case import QUIET, Case, Witness, same_weights
from tests.conformance.columns import BASE
from tests.conformance.networks import Regression, loader
from tests.conformance.table import thing

ROOT = Path(__file__).parents[3]


@thing("one device")
def one_device(case: Case) -> None:
    said = case.heard(Regression(), devices=1, options={"virtual_ranks": 1})
    assert "1 device: nothing is communicated" in said
    facts = case.fit(Regression(), devices=1, options={"virtual_ranks": 1})
    assert facts[0].steps == 12
    assert facts[0].bytes_sent == 0


@thing("more devices than exist: Lightning refuses")
def too_many_devices(case: Case) -> None:
    with pytest.raises(MisconfigurationException, match=r"(?i)gpu"):
        case.trainer(accelerator="gpu", devices=1000)


class _Module(Regression):
    def __init__(self) -> None:
        super().__init__()

    def train_dataloader(self):
        return loader()


@thing("`LightningCLI`")
def cli(case: Case) -> None:
    strategy = case.column.build()
    name = f"{type(strategy).__module__}.{type(strategy).__name__}"
    options = {"start_method": "fork", "virtual_ranks": strategy.virtual_ranks}
    given = {**case.column.options, **options} if case.column.options else options
    chosen = [f"--trainer.strategy={name}"]
    # What the class passes on (`**options`) has no signature that the parser could read; it goes through dict_kwargs.
    named = inspect.signature(type(strategy)).parameters
    for key, value in given.items():
        chosen.append(f"--trainer.strategy.{key if key in named else f'dict_kwargs.{key}'}={value}")
    settings = {**QUIET, "devices": case.column.devices, "callbacks": [Witness(case.folder)]}
    interface = LightningCLI(
        _Module,
        trainer_defaults=settings,
        save_config_callback=None,
        seed_everything_default=False,
        args=["fit", *chosen, "--trainer.max_steps=4"],
    )
    assert type(interface.trainer.strategy) is type(strategy)
    assert interface.trainer.strategy.compressor.__dict__.get("density") == case.column.options.get("density")
    files = sorted(case.folder.glob("rank*.pt"))
    assert [torch.load(file, weights_only=True)["exchanges"] for file in files] == [4] * case.column.devices


@thing("`num_nodes=2` by torchrun", slow=True)
def nodes(case: Case) -> None:
    if case.column.virtual:
        case.fit(Regression(), num_nodes=2)
    same_weights(*(_two_nodes()[case.column.name][rank] for rank in (0, 1)))
    same_weights(_two_nodes()[case.column.name][0], case.one(Regression()).weights, 1e-10)


@functools.cache
def _two_nodes() -> dict[str, list]:
    """Weights of both nodes' ranks, for all columns with real ranks; two torchruns for all of them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    folder = Path(tempfile.mkdtemp())
    run = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1")
    address = ("--master-addr=127.0.0.1", f"--master-port={port}")
    processes = [
        subprocess.Popen(
            [*run, *address, f"--node-rank={node}", "-m", "tests.conformance.node", str(folder)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for node in (0, 1)
    ]
    try:
        for process in processes:
            text, _ = process.communicate(timeout=100)
            assert process.returncode == 0, text
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    names = [column.name for column in BASE if not column.virtual]
    return {
        n: [torch.load(folder / n / f"rank{rank}.pt", weights_only=True)["weights"] for rank in (0, 1)] for n in names
    }
