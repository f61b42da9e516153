"""What each compressor makes of the networks of the literature, from messages that are really put together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from rich.progress import track
from rich.table import Table
from torch import Tensor
from typing_extensions import override

from lightning_distlab.collectives import Gather
from lightning_distlab.collectives.base import Exchange
from lightning_distlab.compression import (
    DGC,
    QSGD,
    Cast,
    Compressor,
    Hyper,
    NoCompression,
    OneBit,
    Param,
    PowerSGD,
    Scratch,
    Sparse,
    State,
    Step,
    TernGrad,
    Threshold,
)
from lightning_distlab.exchange.bucket import Entry, exchange_bucket
from lightning_distlab.payloads import COMPACT_WIRE, PAPER_WIRE, Bundle, Flags, Op, Payload, Wire
from lightning_distlab.report.model_shapes import MODELS, Shapes

BYTE_WIRE = Wire(value="int8", dense="int8")


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        make: The compressor.
        over: Its usual collective: `ring`, `gather` or `native`.
        wire: Codecs.
    """

    make: Callable[[], Compressor]
    over: str
    wire: Wire = field(default_factory=Wire)


METHODS: dict[str, Method] = {
    "none": Method(NoCompression, "native"),
    "cast, bf16": Method(Cast, "native"),
    "sparse 1 %": Method(lambda: Sparse(density=0.01), "gather", COMPACT_WIRE),
    "dgc 0.1 %, paper's wire": Method(lambda: DGC(density=0.001), "gather", PAPER_WIRE),
    "dgc 0.1 %, compact": Method(lambda: DGC(density=0.001), "gather", COMPACT_WIRE),
    "dgc 0.1 %, byte": Method(lambda: DGC(density=0.001), "gather", BYTE_WIRE),
    "powersgd, rank 1": Method(lambda: PowerSGD(rank=1), "native"),
    "powersgd, rank 2": Method(lambda: PowerSGD(rank=2), "native"),
    "powersgd, rank 4": Method(lambda: PowerSGD(rank=4), "native"),
    "onebit": Method(lambda: OneBit(exclude=()), "gather"),
    "threshold, 3.29 σ": Method(lambda: Threshold(threshold=3.29), "gather", BYTE_WIRE),
    "terngrad, 2 bits": Method(TernGrad, "ring"),
    "terngrad, base 3": Method(lambda: TernGrad(code="base3"), "ring"),
    "qsgd, 4 bits": Method(lambda: QSGD(bits=4), "ring"),
    "qsgd, 8 bits": Method(lambda: QSGD(bits=8), "ring"),
}
"""By label. Gradients of the table are normally distributed with σ = 1; a threshold of 3.29 σ sends 0.1 % of them."""


@dataclass(frozen=True)
class Row:
    """One compressor on one network, one step.

    Attributes:
        model: The network.
        compressor: Label of the method.
        dense_bytes: Its gradient in fp32.
        payload_bytes: A rank's own messages, headers included.
        ratio: dense / payload.
        bytes_per_rank_8: What a rank sends on 8 ranks over the method's usual collective, supports taken as disjoint.
        bytes_per_rank_64: On 64 ranks.
        codec_ms: Processor time of a step on one thread: compressing, encoding, updating memories, without merging.
    """

    model: str
    compressor: str
    dense_bytes: int
    payload_bytes: int
    ratio: float
    bytes_per_rank_8: int
    bytes_per_rank_64: int
    codec_ms: float


class _Recorder(Gather):
    """A single rank, whose messages are kept."""

    name: ClassVar[str] = "recorder"

    def __init__(self) -> None:
        self.messages: list[tuple[Op, Payload]] = []

    @override
    def run(self, op: Op, payload: Payload, rank: int, world_size: int) -> Exchange:
        self.messages.append((op, payload))
        return payload
        yield  # a generator, like every exchange


def bytes_sent(messages: Sequence[tuple[Op, Payload]], over: str, ranks: int) -> int:
    """Bytes that a rank sends for messages like these, when all ranks' contributions are as large and disjoint.

    Args:
        messages: Of one rank, in order.
        over: `gather`, `ring` or `native`; a ring is also what is taken for the backend's own all-reduce.
        ranks: Number of ranks.
    """
    total = 0.0
    for op, message in messages:
        if op in (Op.SCATTER_SUM, Op.ALL_GATHER):
            total += message.wire_size() * (ranks - 1) / ranks
        elif over == "gather":
            total += message.wire_size() * (ranks - 1)
        elif over == "native":  # bare tensors, added in the type in which they travel
            assert isinstance(message, Bundle)
            total += 2 * (message.wire_size() - message.header_size) * (ranks - 1) / ranks
        else:  # chunks collect contributions on their way round, and the sums go round once more
            sizes = [message.wire_size(), *(message.max_wire_size(terms) for terms in range(2, ranks + 1))]
            total += (sum(sizes[:-1]) + (ranks - 1) * sizes[-1]) / ranks
    return round(total)


def messages_of(
    compressor: Compressor, wire: Wire, shapes: Shapes, gradients: dict[str, Tensor]
) -> list[tuple[Op, Payload]]:
    """What a rank asks of the others in its first step, in order.

    Args:
        compressor: The method.
        wire: Codecs.
        shapes: Of the network.
        gradients: 1-D, by name; left as they are.
    """
    params = _params(shapes)
    states = {name: compressor.init_state(param) for name, param in params.items()}
    recorder, _ = _step(compressor, wire, params, states, gradients, Step(0, 0.0, 0, 1))
    return recorder.messages


def _params(shapes: Shapes) -> dict[str, Param]:
    """Parameters that take no memory: nothing reads their values."""
    return {n: Param(n, torch.empty(1).expand(s), Hyper(momentum=0.9)) for n, s in shapes.items()}


def _step(
    compressor: Compressor,
    wire: Wire,
    params: dict[str, Param],
    states: dict[str, State],
    gradients: dict[str, Tensor],
    step: Step,
) -> tuple[_Recorder, float]:
    """One step as a single rank; its messages, and processor seconds of compressing, encoding and updating memories."""
    own = {name: gradient.clone() for name, gradient in gradients.items()}
    recorder = _Recorder()
    entries = [Entry(param, own[name], states[name]) for name, param in params.items()]
    started = time.process_time()
    step.observed = compressor.observe(own if compressor.needs_whole_gradient else {}, states, step)
    running = exchange_bucket(entries, compressor, recorder, wire, step, Flags.NONE)
    try:
        next(running)
    except StopIteration as stop:
        pending = stop.value
    for _, message in recorder.messages:
        message.encode()
    pending.commit(pending.present)
    return recorder, time.process_time() - started


def measure(model: str, label: str, shapes: Shapes, gradients: dict[str, Tensor]) -> Row:
    """Run two steps of a compressor as one rank; sizes of the first, time of the faster one.

    Args:
        model: For the row.
        label: Of the method.
        shapes: Of the network.
        gradients: 1-D, by name; left as they are.
    """
    method = METHODS[label]
    compressor, scratch, params = method.make(), Scratch(), _params(shapes)
    states = {name: compressor.init_state(param) for name, param in params.items()}
    first, seconds = _step(compressor, method.wire, params, states, gradients, Step(0, 0.0, 0, 1, scratch=scratch))
    payload = sum(_own_size(op, message) for op, message in first.messages)
    sent = {ranks: bytes_sent(first.messages, method.over, ranks) for ranks in (8, 64)}
    del first
    _, again = _step(compressor, method.wire, params, states, gradients, Step(1, 0.0, 0, 1, scratch=scratch))
    dense = 4 * sum(gradient.numel() for gradient in gradients.values())
    return Row(model, label, dense, payload, dense / payload, sent[8], sent[64], 1e3 * min(seconds, again))


def _own_size(op: Op, message: Payload) -> int:
    """Bytes of a rank's own message; of a gather of owned ranges, which each rank adds its share to, none."""
    return 0 if op is Op.ALL_GATHER else message.wire_size()


def measure_all(models: Sequence[str], labels: Sequence[str]) -> list[Row]:
    """Every method on every network."""
    rows, generator = [], torch.Generator().manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for model in models:
            shapes = MODELS[model]()
            gradients = {n: torch.randn(math.prod(s), generator=generator) for n, s in shapes.items()}
            for label in track(labels, model, transient=True):
                rows.append(measure(model, label, shapes, gradients))
    finally:
        torch.set_num_threads(threads)
    return rows


def rows_as_data(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows for JSON."""
    return [asdict(row) for row in rows]


_COLUMNS = ("model", "compressor", "dense, MB", "payload, kB", "ratio", "8 ranks, MB", "64 ranks, MB", "codec, ms")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.model,
        row.compressor,
        f"{row.dense_bytes / 1e6:.1f}",
        f"{row.payload_bytes / 1e3:,.1f}",
        f"{row.ratio:,.1f}",
        f"{row.bytes_per_rank_8 / 1e6:.2f}",
        f"{row.bytes_per_rank_64 / 1e6:.2f}",
        f"{row.codec_ms:.0f}",
    )


def compression_table(rows: Sequence[Row]) -> Table:
    """Rows for the terminal."""
    out = Table(title="One step of one rank; bytes sent per rank take supports as disjoint")
    for i, column in enumerate(_COLUMNS):
        out.add_column(column, justify="left" if i < 2 else "right")
    for i, row in enumerate(rows):
        out.add_row(*_cells(row), end_section=i + 1 < len(rows) and rows[i + 1].model != row.model)
    return out


def compression_page(rows: Sequence[Row]) -> str:
    """Rows as a page of the documentation."""
    lines = [
        "# Compression",
        "",
        "One step of one rank, written by `distlab compression-table --page docs/compression.md`. Gradients are",
        "normally distributed with σ = 1; sizes are those of messages that were really encoded, headers and dense",
        "tails included. The bytes that a rank sends among 8 and 64 ranks are those of the method's usual collective",
        "(direct exchange for sparse ones, a ring for the others), with the ranks' supports taken as disjoint: what",
        "coincides is merged on the way and sent once. Codec time is processor time on one thread of a shared machine,",
        "without merging what others sent; a rank alone owns all sums of `onebit`, and so quantises twice what one of",
        "many does, or nearly. `onebit` compresses the embedding here too, which training should exclude.",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        f"|---|---|{'---:|' * (len(_COLUMNS) - 2)}",
    ]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    return "\n".join([*lines, ""])
