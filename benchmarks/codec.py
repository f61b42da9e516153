"""Top-k selection and wire codec against exact `torch.topk` and against sampled selection as published with DGC.

    python benchmarks/codec.py --json codec.json

One thread, CPU, fp32. Columns:

- ours: exact top k, gather of the values, encoding (Rice indices, fp16 values) and decoding of both;
- topk: `torch.topk(x.abs(), k)` alone;
- sampled: selection alone, by the scheme of the official Deep Gradient Compression code, written anew with the fastest
  torch operations known to us: threshold from a 1 % sample, at most ten rounds of adaptation, cut to k by position.

Repetitions are interleaved and their medians reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_distlab.compression.selection import SCRATCH_BYTES, top_k
from lightning_distlab.payloads.codecs import INDEX_CODECS, VALUE_CODECS

ALEXNET = 60_954_656
"""Weights of the grouped AlexNet without its biases."""


class Ours:
    def __init__(self, numel: int, k: int) -> None:
        self.numel, self.k, self.step = numel, k, 0
        self.scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8)
        self.index, self.value = INDEX_CODECS["rice"], VALUE_CODECS["fp16"]

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.step += 1
        indices = top_k(x, self.k, scratch=self.scratch, seed=self.step)
        index_bytes = self.index.encode(indices, self.numel)
        value_bytes = self.value.encode(x[indices])
        return (
            self.index.decode(index_bytes, self.k, self.numel),
            self.value.decode(value_bytes, self.k, x.dtype),
        )


class Exact:
    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, x: Tensor) -> Tensor:
        return torch.topk(x.abs(), self.k).indices


class Sampled:
    """A 1 % strided sample gives the threshold; [0.8 k, 1.3 k] survivors pass, fewer lower it, more are cut exactly."""

    def __init__(self, numel: int, k: int) -> None:
        self.k, self.density = k, k / numel
        # Kept from call to call: fresh memory of this size costs the page faults of half the run time.
        self.magnitudes, self.mask = torch.empty(numel), torch.empty(numel, dtype=torch.bool)
        self.stride = 97
        self.step = 0

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.step += 1
        magnitudes = torch.abs(x, out=self.magnitudes)
        sample = magnitudes[self.step % self.stride :: self.stride]
        threshold = torch.topk(sample, max(1, int(sample.numel() * self.density)), sorted=False).values.min()
        indices = self._reaching(threshold)
        for _ in range(10):
            if indices.numel() > 1.3 * self.k:
                indices = indices[torch.topk(magnitudes[indices], self.k, sorted=False).indices]
                break
            if indices.numel() >= 0.8 * self.k:
                break
            threshold = threshold * 0.8
            indices = self._reaching(threshold)
        indices = indices[: self.k]
        return indices, x[indices]

    def _reaching(self, threshold: Tensor) -> Tensor:
        return torch.ge(self.magnitudes, threshold, out=self.mask).nonzero().view(-1)


def check(ours: Ours, x: Tensor, k: int) -> float:
    """The result is the exact top k; returns bits per index."""
    indices, values = ours(x)
    found = x[indices].abs().sort(descending=True).values
    if not torch.equal(found, torch.topk(x.abs(), k).values):
        raise SystemExit(f"The selection of {k} of {x.numel()} is not the top k.")
    if not torch.allclose(values, x[indices], rtol=2**-11, atol=0):
        raise SystemExit("Decoded values are off by more than half precision allows.")
    return 8 * ours.index.size(indices, x.numel()) / k


def measure(x: Tensor, density: float, repeats: int) -> dict[str, float | int]:
    numel = x.numel()
    k = max(1, int(numel * density))
    ours = Ours(numel, k)
    contestants: dict[str, Callable[[Tensor], object]] = {
        "ours_ms": ours,
        "topk_ms": Exact(k),
        "sampled_ms": Sampled(numel, k),
    }
    bits = check(ours, x, k)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for contestant in contestants.values():
        contestant(x)
    names = list(contestants)
    for repeat in range(repeats):
        for name in names if repeat % 2 == 0 else reversed(names):
            start = time.perf_counter()
            contestants[name](x)
            times[name].append(1e3 * (time.perf_counter() - start))
    row: dict[str, float | int] = {"n": numel, "density": density}
    row.update({name: statistics.median(samples) for name, samples in times.items()})
    return row | {"k": k, "index_bits": bits, "repeats": repeats}


def table(rows: list[dict[str, float | int]]) -> Table:
    out = Table(title="Selection and codec, one thread (ms, median)")
    for column in ("n", "density", "bits/index", "ours", "topk", "sampled", "topk / ours", "sampled / ours"):
        out.add_column(column, justify="right")
    for row in rows:
        out.add_row(
            f"{row['n']:,}",
            f"{row['density']:.2%}",
            f"{row['index_bits']:.2f}",
            *(f"{row[name]:.1f}" for name in ("ours_ms", "topk_ms", "sampled_ms")),
            f"{row['topk_ms'] / row['ours_ms']:.1f}x",
            f"{row['sampled_ms'] / row['ours_ms']:.1f}x",
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000_000, ALEXNET], help="elements")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.001, 0.01])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for numel in args.sizes:
        x = torch.randn(numel, generator=torch.Generator().manual_seed(args.seed))
        rows += [measure(x, density, args.repeats) for density in args.densities]
    Console().print(table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
