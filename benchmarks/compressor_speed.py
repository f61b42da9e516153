"""Processor time of each compressor against the published method in plain torch operations, on ResNet-18's tensors.

    python -m benchmarks.compressor_speed --json compressors.json

One thread, CPU, fp32, the 62 parameters (11,173,962 elements) of ResNet-18 for CIFAR-10, two ranks that hold the same
gradient, no network: a step turns this rank's gradients into averages.

- ours: the compressor's own generators, all tensors in lock step as in one bucket; each payload is rounded to the wire,
  encoded and decoded, and the reply is what that operation makes of two equal ranks;
- baseline: `benchmarks/compressors/baseline_*.py`, whose messages are memory copies.

Both do the same work on copies of the same gradients, which are made outside the clock. Steps alternate (ABBA); the
minimum of `time.process_time` over all of them is reported, which other programs on the machine disturb least.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.compressors.baseline_dgc import PlainDGC
from benchmarks.compressors.baseline_onebit import OneBit as PlainOneBit
from benchmarks.compressors.baseline_powersgd import PowerSGD as PlainPowerSGD
from benchmarks.compressors.baseline_terngrad import TernGrad as PlainTernGrad
from benchmarks.compressors.common import WORLD, Baseline, random_gradients, resnet18_shapes
from lightning_distlab.compression import DGC, Compressor, Hyper, OneBit, Param, PowerSGD, Scratch, Step, TernGrad
from lightning_distlab.payloads import Op, Payload, Reply, Request, Wire

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        ours: Makes our compressor.
        baseline: Makes the plain version for tensors of given shapes.
        wire: Codecs of our messages.
    """

    ours: Callable[[], Compressor]
    baseline: Callable[[Shapes], Baseline]
    wire: Wire = field(default_factory=Wire)


METHODS: dict[str, Method] = {
    "dgc": Method(lambda: DGC(density=0.001), lambda shapes: PlainDGC(shapes, 0.001)),
    "onebit": Method(OneBit, PlainOneBit),
    "terngrad": Method(TernGrad, PlainTernGrad),
    **{
        f"powersgd_r{rank}": Method(lambda r=rank: PowerSGD(rank=r), lambda shapes, r=rank: PlainPowerSGD(shapes, r))
        for rank in (1, 2, 4)
    },
}
"""By name; a method is one file `baseline_<method>.py` and an entry here."""


class Ours:
    """A compressor's generators in lock step, and the peer's messages, which are copies of ours."""

    def __init__(self, method: Method, shapes: Shapes) -> None:
        self.compressor, self.wire = method.ours(), method.wire
        self.params = {name: Param(name, torch.zeros(shape), Hyper(momentum=0.9)) for name, shape in shapes.items()}
        self.states = {name: self.compressor.init_state(param) for name, param in self.params.items()}
        self.scratch, self.index = Scratch(), 0

    def step(self, grads: Mapping[str, Tensor]) -> None:
        step = Step(self.index, 0.0, 0, WORLD, scratch=self.scratch)
        self.index += 1
        flat = {name: grad.view(-1) for name, grad in grads.items()}
        whole = flat if self.compressor.needs_whole_gradient else {}
        step.observed = self.compressor.observe(whole, self.states, step)
        running = {
            name: self.compressor.exchange(flat[name], self.states[name], param, step)
            for name, param in self.params.items()
        }
        requests: dict[str, Request] = {name: next(generator) for name, generator in running.items()}
        final: dict[str, Reply] = {}
        while requests:
            replies = {name: self._reply(request) for name, request in requests.items()}
            final |= {name: replies.pop(name) for name, request in requests.items() if request.final}
            requests = {name: running[name].send(reply) for name, reply in replies.items()}
        for name, reply in final.items():
            try:
                running[name].send(reply)
            except StopIteration:
                continue
            raise SystemExit(f"{name}: the compressor asked again after its final request")

    def _reply(self, request: Request) -> Reply:
        """What two ranks with the same contribution make of it."""
        own, error = request.payload.rounded(self.wire)
        if request.op is Op.SCATTER_SUM:  # the peer's part goes out, a copy of this rank's comes in
            mine = own.split_evenly(WORLD)[0]
            return Reply(type(mine).merge_all([mine, _travelled(mine)]), error)
        if request.op is Op.ALL_GATHER:
            mine, other = own.split_evenly(WORLD)
            _travelled(mine)
            return Reply(type(own).concat([mine, other]), error)
        peer = _travelled(own)
        if request.op is Op.GATHER:
            return Reply(own, error, (own, peer))
        return Reply(own.maximum(peer) if request.op is Op.MAX else type(own).merge_all([own, peer]), error)


def _travelled(payload: Payload) -> Payload:
    return payload.decode(payload.encode())


def measure(name: str, method: Method, shapes: Shapes, repeats: int) -> dict[str, str | float]:
    contestants: list[Baseline] = [Ours(method, shapes), method.baseline(shapes)]
    gradients = random_gradients(shapes, seed=0)
    best = [float("inf"), float("inf")]
    for repeat in range(-2, repeats):  # the first two fill caches and allocate what is kept
        for i in (0, 1) if repeat % 2 == 0 else (1, 0):
            copies = {key: grad.clone() for key, grad in gradients.items()}
            start = time.process_time()
            contestants[i].step(copies)
            if repeat >= 0:
                best[i] = min(best[i], 1e3 * (time.process_time() - start))
    return {"method": name, "ours_ms": best[0], "baseline_ms": best[1], "ratio": best[1] / best[0], "repeats": repeats}


def table(rows: list[dict[str, str | float]]) -> Table:
    out = Table(title="One step of ResNet-18, one thread (processor ms, minimum)")
    for column in ("method", "ours", "baseline", "baseline / ours"):
        out.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        out.add_row(str(row["method"]), f"{row['ours_ms']:.1f}", f"{row['baseline_ms']:.1f}", f"{row['ratio']:.2f}x")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(name, METHODS[name], resnet18_shapes(), args.repeats) for name in args.methods]
    Console().print(table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
