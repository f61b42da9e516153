"""Links with real delay: messages of many buckets are under way and overtake each other differently on each rank."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from lightning_distlab.collectives import COLLECTIVES, legal_collectives
from lightning_distlab.compression import COMPRESSORS
from lightning_distlab.strategies import CompressedStrategy
from tests.strategies.fits import Small, fit, same_bits

RANKS, STEPS, BUCKET_MB = 3, 5, 0.004
LONGEST_DELAY_S = 0.02


class Late:
    """A message that leaves after a while, whatever its sender does in the meantime."""

    def __init__(self, send: Any, delay: float, args: Any, kwargs: Any) -> None:
        self._work: Any = None
        self._error: BaseException | None = None

        def run() -> None:
            time.sleep(delay)
            try:
                self._work = send(*args, **kwargs)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def wait(self, *args: Any) -> Any:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._work.wait(*args)


def delay_messages(patch: pytest.MonkeyPatch) -> None:
    """Every message leaves late, each by its own time; the backend's own collectives begin late."""
    send, all_reduce = dist.isend, dist.all_reduce
    generators: dict[int, random.Random] = {}

    def delay() -> float:
        rank = dist.get_rank()
        return generators.setdefault(rank, random.Random(rank)).uniform(0, LONGEST_DELAY_S)

    def late_all_reduce(*args: Any, **kwargs: Any) -> Any:
        time.sleep(delay() / 4)
        return all_reduce(*args, **kwargs)

    patch.setattr(dist, "isend", lambda *args, **kwargs: Late(send, delay(), args, kwargs))
    patch.setattr(dist, "all_reduce", late_all_reduce)


def run(folder: Path, compressor: str, collective: str) -> Any:
    """Train a network of several buckets; biases make dense tails beside compressed matrices."""

    def net() -> nn.Module:
        return nn.Sequential(
            nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 21), nn.Tanh(), nn.Linear(21, 1)
        )

    strategy = CompressedStrategy(
        COMPRESSORS[compressor](), COLLECTIVES[collective](), bucket_cap_mb=BUCKET_MB, start_method="fork"
    )
    module = Small(net, lambda p: SGD(p, lr=0.01, momentum=0.9), dtype=torch.float32, batch_size=3)
    return fit(folder, module, strategy, RANKS, steps=STEPS)


def pairs() -> list[tuple[str, str]]:
    """Every compressor, with the first and the last collective that can carry it, and some more."""
    chosen = []
    for name, kind in COMPRESSORS.items():
        legal = legal_collectives(kind().rounds)
        chosen += [(name, collective) for collective in dict.fromkeys((legal[0], legal[-1]))]
    return [*chosen, ("dgc", "ring"), ("dgc", "gtopk"), ("dgc", "balanced"), ("terngrad", "auto"), ("powersgd", "ring")]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("compressor", "collective"), pairs())
def test_delays_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compressor: str, collective: str
) -> None:
    """The averages are the same bits as without delay, on all ranks, and no memory is lost."""
    prompt = run(tmp_path / "prompt", compressor, collective)
    delay_messages(monkeypatch)
    late = run(tmp_path / "late", compressor, collective)
    for rank in range(RANKS):
        assert same_bits(prompt.ranks[rank]["weights"], late.ranks[rank]["weights"])
        assert same_bits(late.ranks[rank]["weights"], late.ranks[0]["weights"])
    for rank, states in prompt.states().items():
        for name, state in states.items():
            assert same_bits(state, late.states()[rank][name])
