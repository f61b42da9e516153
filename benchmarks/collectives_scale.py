"""How long one process takes to play many ranks of an all-reduce, message by message.

python benchmarks/collectives_scale.py --ranks 1024 --json scale.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from lightning_distlab.collectives import COLLECTIVES
from lightning_distlab.exchange.drivers import InProcessDriver
from lightning_distlab.payloads import DensePayload, Op


def measure(name: str, ranks: int) -> dict[str, float | int | str]:
    """Seconds and messages of one sum of a vector with one element per rank; the result is checked."""
    collective = COLLECTIVES[name]()
    driver = InProcessDriver(ranks)
    payloads = [DensePayload(torch.full((ranks,), float(rank), dtype=torch.float64)) for rank in range(ranks)]
    started = time.perf_counter()
    results = driver.run({r: collective.run(Op.SUM, payloads[r], r, ranks) for r in range(ranks)}, name)
    seconds = time.perf_counter() - started
    expected = ranks * (ranks - 1) / 2
    assert all(bool((result.values == expected).all()) for result in results.values())
    messages = sum(account.messages for account in driver.ledger.accounts.values())
    return {"algorithm": name, "ranks": ranks, "messages": messages, "seconds": round(seconds, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--algorithms", nargs="+", default=["ring", "recursive_doubling"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(name, options.ranks) for name in options.algorithms]
    table = Table("algorithm", "ranks", "messages", "seconds", title="All-reduce of many ranks in one process")
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
