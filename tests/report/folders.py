"""Folders of runs as training leaves them."""

import json
from pathlib import Path
from typing import Any


def write_run(folder: Path, strategy: str, seed: int, acc: float, sent: float | None = 2.0**20, **config: Any) -> Path:
    """A run's `summary.json` and `csv/metrics.csv`."""
    (folder / "csv").mkdir(parents=True)
    content = {
        "strategy": strategy,
        "recipe": "digits",
        "job_type": "train",
        "world_size": 2,
        "seed": seed,
        "steps": 100,
        "wall_s": 10.0 + seed,
        "comm/payload_ratio": None if sent is None else 50.0,
        "comm/bytes_sent_per_rank": sent,
        "comm/codec_ms": None if sent is None else 7.0,
        "last": {"val/acc": acc, "val/loss": "nan"},
        "best": {"val/acc": acc + 0.01},
        "config": {"strategy.name": strategy, "trainer.default_root_dir": str(folder), "seed": seed, **config},
    }
    (folder / "summary.json").write_text(json.dumps(content))
    rows = ["epoch,step,val/acc,train/loss", f"0,49,{acc - 0.1},", "0,50,,1.5", f"1,99,{acc},"]
    (folder / "csv" / "metrics.csv").write_text("\n".join(rows) + "\n")
    return folder
