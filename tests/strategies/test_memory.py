"""Live tensor bytes above Lightning's DDP, counted by the allocator: what a strategy adds is what its method needs."""

from __future__ import annotations

import pytest

from benchmarks.memory import BASELINE, compare, measure
from lightning_distlab.compression.selection import SCRATCH_BYTES


@pytest.fixture(scope="module")
def baseline() -> tuple[int, int]:
    return measure(BASELINE)


# SGD's momentum is as large as the parameters; DGC takes it out of the optimizer.
MEMORIES = {"none": 0, "sparse": 1, "dgc": 2 - 1, "dgc after_backward": 2 - 1, "dgc weight decay": 3 - 1}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", MEMORIES)
def test_memory_above_ddp(name: str, baseline: tuple[int, int]) -> None:
    """Memories as large as the parameters, plus two buckets; the search for the threshold adds a fixed amount."""
    (row,) = compare([name], baseline)
    memories = MEMORIES[name] * row["parameters_bytes"]
    fixed = 0 if name == "none" else SCRATCH_BYTES
    small = 0.02 * row["parameters_bytes"]  # vectors' rounding errors, counters, messages
    assert memories - small <= row["between_steps"] <= memories + row["bucket_bytes"] + fixed + small
    assert row["peak"] <= memories + 2 * row["bucket_bytes"] + fixed + small
