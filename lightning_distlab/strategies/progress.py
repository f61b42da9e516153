"""Where a run stands, as compressors want to know it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lightning.pytorch as pl


def global_seed() -> int:
    """What `seed_everything` was given, else 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def epoch_fraction(trainer: pl.Trainer) -> float:
    """Epochs done, as a fraction; without one where the number of batches is not known (an IterableDataset)."""
    batches = trainer.num_training_batches
    done = trainer.fit_loop.epoch_loop.batch_idx
    share = done / batches if isinstance(batches, int) and batches > 0 else 0.0
    return trainer.current_epoch + min(share, 1.0)
