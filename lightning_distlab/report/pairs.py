"""Which compressor runs over which collective, read from the code."""

from __future__ import annotations

from rich.table import Table

from lightning_distlab.collectives import COLLECTIVES, ParameterServer
from lightning_distlab.collectives.base import Collective
from lightning_distlab.compression import COMPRESSORS, Compressor


def reason(compressor: Compressor, collective: Collective) -> str | None:
    """Why a pair cannot be, or None when it can."""
    for spec in compressor.rounds:
        refusal = collective.supports(spec)
        if refusal is not None:
            return refusal
    return None


def pairs_table() -> Table:
    """Legal pairs for the terminal."""
    out = Table(title="Compressors (rows) over collectives (columns)")
    out.add_column("")
    for name in COLLECTIVES:
        out.add_column(name, justify="center")
    for name, kind in COMPRESSORS.items():
        out.add_row(name, *("yes" if reason(kind(), c()) is None else "-" for c in COLLECTIVES.values()))
    return out


def pairs_page() -> str:
    """The page `docs/pairs.md`."""
    lines = [
        "# Legal pairs",
        "",
        "Which compressor runs over which collective. A compressor states its rounds before any payload exists; a pair",
        "that does not fit is refused when it is built. This page is written by `distlab pairs --page docs/pairs.md`.",
        "",
        f"| | {' | '.join(f'`{name}`' for name in COLLECTIVES)} |",
        f"|---|{':---:|' * len(COLLECTIVES)}",
    ]
    refused: dict[str, list[str]] = {}
    for name, kind in COMPRESSORS.items():
        cells = []
        for other, collective in COLLECTIVES.items():
            why = reason(kind(), collective())
            cells.append("yes" if why is None else "–")
            if why is not None:
                refused.setdefault(why, []).append(f"`{name}` over `{other}`")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    lines += ["", "## What each asks of the ranks", "", "| compressor | rounds |", "|---|---|"]
    for name, kind in COMPRESSORS.items():
        rounds = ", then ".join(f"{spec.op.name} of {spec.payload.__name__}" for spec in kind().rounds)
        lines.append(f"| `{name}` | {rounds} |")
    lines += ["", "## Why the others cannot be", "", "| reason | pairs |", "|---|---|"]
    lines += [f"| {why} | {', '.join(pairs)} |" for why, pairs in refused.items()]
    lines += [
        "",
        "With `density=1` nothing is sparse and every payload is dense, so `sparse` and `dgc` then run over `native`",
        "too. `hierarchical` refuses methods that look at a rank's whole gradient first (`sparse` with its global",
        f"threshold, `dgc` with exact clipping). `{ParameterServer.name}` with `dedicated=True` is for",
        "programs of one's own.",
        "",
    ]
    return "\n".join(lines)
