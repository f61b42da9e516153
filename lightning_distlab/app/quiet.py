"""Fewer lines that say nothing about the run."""

from __future__ import annotations

import logging
import warnings


def hush() -> None:
    """Drop advertisements and deprecation notes that Lightning prints about itself."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_advertisement)
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
    warnings.filterwarnings("ignore", message=r".*does not have many workers.*")


def _is_no_advertisement(record: logging.LogRecord) -> bool:
    return "Tip:" not in record.getMessage()
