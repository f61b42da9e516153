"""How sparse sums fill up on their way through a butterfly, with real gradients, and what PowerSGD sends beside it.

    python -m benchmarks.densification --data $DISTLAB_DATA/cifar10 --json densification.json --plot densification.png

ResNet-8 is trained for a while on CIFAR-10 with SGD; then 64 ranks take the gradient of a batch of their own, and each
sends the largest entries over all of its tensors. Step t of recursive doubling merges what 2^t ranks have sent.
"Disjoint": as many entries, nowhere twice, the worst case (density doubles at every step). "Independent": entries at
random places, 1 - (1 - d)^(2^t). Rows: `density, step, merged_ranks, disjoint, independent, real, sparse_bytes,
powersgd_bytes`, with the bytes that one rank sends in that step: of the real partial sum, compact wire, and of
PowerSGD's factors at rank 2, which have one size whatever the number of ranks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_distlab.compression import Param, PowerSGD
from lightning_distlab.compression.averaging import entries
from lightning_distlab.compression.powersgd import matrix_shape
from lightning_distlab.compression.selection import top_k
from lightning_distlab.payloads import COMPACT_WIRE, SparsePayload
from recipes.vision.decode_cache import default_cache_dir, load_decoded
from recipes.vision.image_sources import find_source
from recipes.vision.nets import build_net

RANKS, BATCH, TRAINED_STEPS = 64, 32, 300
DENSITIES = (0.001, 0.01)


def images(root: Path) -> tuple[Tensor, Tensor]:
    """Training images, normalised, and labels."""
    decoded = load_decoded(default_cache_dir(), find_source(root), root, "train")
    return decoded.images, torch.as_tensor(decoded.labels)


def batch(pixels: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    chosen = torch.randint(len(labels), (BATCH,), generator=generator)
    x = pixels[chosen].float().div_(255).sub_(0.47).div_(0.25)
    return x, labels[chosen]


def gradients_of_ranks(root: Path) -> tuple[nn.Module, list[Tensor]]:
    """A network some steps into training, and 64 gradients of its compressible tensors, each flat."""
    pixels, labels = images(root)
    torch.manual_seed(0)
    net, generator = build_net("resnet8"), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in track(range(TRAINED_STEPS), "Training", transient=True):
        x, y = batch(pixels, labels, generator)
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    taken = []
    for _ in range(RANKS):
        x, y = batch(pixels, labels, generator)
        net.zero_grad()
        cross_entropy(net(x), y).backward()
        taken.append(
            torch.cat([p.grad.view(-1).clone() for p in net.parameters() if p.dim() > 1 and p.grad is not None])
        )
    return net, taken


def rows(net: nn.Module, taken: list[Tensor]) -> list[dict[str, Any]]:
    size = taken[0].numel()
    compressor, factors = PowerSGD(rank=2), 0
    for name, p in net.named_parameters():
        if compressor.reason(Param(name, p.detach())) is None:
            factors += 4 * 2 * sum(matrix_shape(p))
        elif p.dim() > 1:
            factors += 4 * p.numel()
    out: list[dict[str, Any]] = []
    for density in DENSITIES:
        count = entries(density, size)
        sums = []
        for gradient in taken:
            indices = top_k(gradient, count)
            payload = SparsePayload(indices, gradient[indices], size, count)
            sums.append(payload.rounded(COMPACT_WIRE)[0])
        step = 0
        while True:
            merged = RANKS // len(sums)
            real = sum(len(s.indices) for s in sums) / len(sums) / size
            out.append(
                {
                    "density": density,
                    "step": step,
                    "merged_ranks": merged,
                    "disjoint": min(1.0, merged * count / size),
                    "independent": 1 - (1 - count / size) ** merged,
                    "real": real,
                    "sparse_bytes": round(sum(s.wire_size() for s in sums) / len(sums)),
                    "powersgd_bytes": factors,
                }
            )
            if len(sums) == 1:
                break
            sums = [a.merge(b) for a, b in zip(sums[::2], sums[1::2], strict=True)]
            step += 1
    return out


def table(found: list[dict[str, Any]]) -> Table:
    out = Table(title=f"Partial sums of {RANKS} ranks in a butterfly, ResNet-8 on CIFAR-10")
    for column in found[0]:
        out.add_column(column, justify="right")
    for row in found:
        out.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    return out


def plot(found: list[dict[str, Any]], path: Path) -> None:
    import matplotlib.pyplot as plt

    from lightning_distlab.report.style import MARKERS, PALETTE, figure_style

    with figure_style():
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8))
        for i, density in enumerate(DENSITIES):
            own = [row for row in found if row["density"] == density]
            ranks = [row["merged_ranks"] for row in own]
            color, marker = PALETTE[i], MARKERS[i]
            for key, style in (("disjoint", ":"), ("independent", "--"), ("real", "-")):
                values = [row[key] for row in own]
                left.plot(ranks, values, style, color=color, marker=marker if key == "real" else "",
                          label=f"{100 * density:g} %, {key}")  # fmt: skip
            sizes = [row["sparse_bytes"] / 1e3 for row in own]
            right.plot(ranks, sizes, color=color, marker=marker, label=f"sparse {100 * density:g} %, real")
        right.plot(ranks, [row["powersgd_bytes"] / 1e3 for row in own], color=PALETTE[2], label="PowerSGD, rank 2")
        left.set_ylabel("density of the partial sum")
        right.set_ylabel("kB sent by a rank in this step")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xlabel("ranks merged, 2^step")
            axes.legend(fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder of CIFAR-10")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--plot", type=Path, help="draw them into this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = rows(*gradients_of_ranks(args.data))
    Console(width=160).print(table(found))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    if args.plot is not None:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
