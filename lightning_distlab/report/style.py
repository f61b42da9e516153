"""One look for all figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

# Okabe & Ito 2008: told apart with every common colour blindness.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

_RC: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "figure.dpi": 120,
    "figure.figsize": (8.0, 5.0),
    "font.size": 11,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "savefig.dpi": 150,
}


@contextmanager
def figure_style() -> Iterator[None]:
    """Draw in the house style inside this context."""
    with plt.rc_context(_RC):
        yield
