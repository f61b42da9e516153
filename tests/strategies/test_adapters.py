"""Both ways into the engine leave the same bits, and all replicas stay alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from lightning_distlab.collectives import COLLECTIVES
from lightning_distlab.strategies import CompressedStrategy, DGCStrategy
from tests.strategies.fits import Fit, Small, distance, fit, same_bits


def wide_net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 61), nn.Tanh(), nn.Linear(61, 45), nn.Tanh(), nn.Linear(45, 1))


def module(**options: Any) -> Small:
    return Small(wide_net, lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01), dtype=torch.float32, **options)


def run(folder: Path, collective: str, overlap: str, devices: int, **options: Any) -> Fit:
    if collective == "native":
        strategy = CompressedStrategy(overlap=overlap, start_method="fork", **options)  # type: ignore[arg-type]
    else:
        strategy = DGCStrategy(0.05, collective=collective, overlap=overlap, start_method="fork", **options)
    made = fit(folder, module(batch_size=2), strategy, devices, steps=12, accumulate_grad_batches=2)
    assert all(record["overlap"] == overlap for record in made.ranks)
    return made


@pytest.mark.parametrize("collective", sorted(COLLECTIVES))
@pytest.mark.parametrize(("devices", "bucket_cap_mb"), [(2, 0.005), (4, 25.0)], ids=["2 ranks, buckets", "4 ranks"])
def test_both_adapters_are_bit_equal(tmp_path: Path, collective: str, devices: int, bucket_cap_mb: float) -> None:
    """With 2 ranks a sum has one order, whatever the buckets. With 4 the same buckets are needed for the same bits,
    and the backend's own all-reduce adds in an order that depends on the place in the bucket, which DDP chooses."""
    first = run(tmp_path / "a", collective, "bucket", devices, bucket_cap_mb=bucket_cap_mb)
    second = run(tmp_path / "b", collective, "after_backward", devices, bucket_cap_mb=bucket_cap_mb)
    if collective == "native" and devices > 2:
        assert distance(first.weights, second.weights) < 1e-6
        return
    assert same_bits(first.weights, second.weights)
    for rank, states in first.states().items():
        for name, state in states.items():
            assert same_bits(state, second.states()[rank][name]), (rank, name)


@pytest.mark.parametrize("name", ["dgc_ring", "sparse_gather", "dgc_recursive_doubling"])
@pytest.mark.parametrize("devices", [2, 3])
def test_replicas_are_bit_equal_after_50_steps(tmp_path: Path, name: str, devices: int) -> None:
    from lightning_distlab.strategies import NAMES

    kind, _, preset = NAMES[name]
    strategy = kind(density=0.05, check_replicas_every_n_steps=10, start_method="fork", **preset)
    done = fit(tmp_path, module(), strategy, devices, steps=50)
    assert done.ranks[0]["steps"] == 50
    for record in done.ranks[1:]:
        assert same_bits(record["weights"], done.weights)
    memories = [states["net.2.weight"] for states in done.states().values()]
    assert not torch.equal(*[next(iter(m.values())) for m in memories[:2]]), "residuals are each rank's own"


class Drifting(Small):
    """Rank 1 loses a weight's last bit by itself."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.global_rank == 1:
            with torch.no_grad():
                next(self.net.parameters()).view(-1)[0].nextafter_(torch.tensor(9.0))


def test_replicas_that_drift_are_found(tmp_path: Path) -> None:
    strategy = CompressedStrategy(check_replicas_every_n_steps=1, start_method="fork")
    with pytest.raises(Exception, match=r"drifted apart: ranks \[1\] differ from rank 0"):
        fit(tmp_path, Drifting(wide_net, dtype=torch.float32), strategy, 2, steps=6)
