"""The capability table: for each strategy and each thing a user does, it passes, or refuses with a documented text.

Rows are the functions that `thing` has registered. Columns are in `columns.py`. Everything is expected to pass but for
the cells in `EXCEPTIONS`; a new strategy adds its column, and its exceptions.

`python -m tests.conformance.table` writes `docs/conformance.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.case import Case
from tests.conformance.columns import ALIASES, BASE

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"


@dataclass(frozen=True)
class Thing:
    """Something a user does.

    Attributes:
        title: Row heading.
        check: Does it and asserts what must come of it.
        aliases: Also checked for the aliases of pairs.
        slow: Starts whole programs.
    """

    title: str
    check: Callable[[Case], None]
    aliases: bool = False
    slow: bool = False


@dataclass(frozen=True)
class Refuses:
    """A cell that must raise.

    Attributes:
        pattern: Regular expression that the message matches.
        why: The short form for the table.
    """

    pattern: str
    why: str


THINGS: dict[str, Thing] = {}

_CLIP = Refuses("clip the local gradient with the compressor's clip_norm instead", "use `clip_norm`")
_STREAM = Refuses("virtual_ranks needs a train DataLoader over a dataset with a length", "needs a length")
_MANUAL = Refuses("virtual_ranks=2 runs training_step once per rank .* needs automatic optimization", "automatic only")
_NO_CPU = Refuses("sync_batchnorm=True needs GPUs", "no CPU kernel in torch")
_VIRTUAL = "dgc_ring, virtual"

EXCEPTIONS: dict[str, dict[str, Refuses]] = {
    "clip": {"dgc_ring": _CLIP, _VIRTUAL: _CLIP},
    "sync_batchnorm": {
        "distlab_ddp": _NO_CPU,
        "sparse_gather": _NO_CPU,
        "dgc_ring": _NO_CPU,
        **dict.fromkeys(("powersgd", "onebit", "threshold", "terngrad", "qsgd"), _NO_CPU),
        _VIRTUAL: Refuses("sync_batchnorm=True has no meaning with virtual_ranks", "ranks run one after the other"),
    },
    "iterable": {_VIRTUAL: _STREAM},
    "iterable_unequal": {_VIRTUAL: _STREAM},
    "iterable_max_steps": {_VIRTUAL: _STREAM},
    "manual": {_VIRTUAL: _MANUAL},
    "manual_accumulation": {_VIRTUAL: _MANUAL},
    "bucket_accumulation": {_VIRTUAL: Refuses("virtual_ranks=2 plays all ranks .* after the backward", "one process")},
    "nodes": {_VIRTUAL: Refuses("plays all ranks in one process, but devices x nodes = 2", "one process")},
}


def thing(title: str, *, aliases: bool = False, slow: bool = False) -> Callable[[Callable[[Case], None]], None]:
    """Register a function as a row; its name is the row's key."""

    def register(check: Callable[[Case], None]) -> None:
        THINGS[check.__name__] = Thing(title, check, aliases, slow)

    return register


def page() -> str:
    """The table in Markdown."""
    import tests.conformance.things  # noqa: F401  (registers the rows)

    names = [column.name for column in BASE]
    lines = [
        "# Conformance",
        "",
        "What a user does, and whether a strategy takes part: **yes**, or it refuses before anything is lost, for the",
        "reason given. `tests/conformance` tries every cell, on two ranks on a CPU; this page is written by",
        "`python -m tests.conformance.table`. In its lossless setting (`density=1`, `momentum_masking=False`, exact",
        "codecs; everything below PowerSGD's least rate; everything excluded, for methods that always round) a",
        "strategy is compared with one process on the union of the batches, in fp64, to 1e-10.",
        "",
        f"| | {' | '.join(f'`{name}`' for name in names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for key, row in THINGS.items():
        cells = [f"refused: {e.why}" if (e := EXCEPTIONS.get(key, {}).get(name)) else "yes" for name in names]
        lines.append(f"| {row.title} | {' | '.join(cells)} |")
    checked = ", ".join(row.title for row in THINGS.values() if row.aliases)
    lines += ["", f"For {', '.join(f'`{c.name}`' for c in ALIASES)}: {checked}.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    import importlib

    PAGE.write_text(importlib.import_module("tests.conformance.table").page())  # where the rows register
