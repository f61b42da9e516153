"""Reading W&B's own files back, without a server.

W&B has no public Python reader for offline runs; its command line has one. This module alone knows about it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class WandbRun:
    """One run as its ``.wandb`` file holds it.

    Attributes:
        name: Display name.
        group: Group, "" if none.
        job_type: Job type, "" if none.
        tags: Tags.
        config: Settings by flat key.
        summary: Summary values by key; NaN and infinities are strings.
        history: Logged rows in order, only if asked for.
        exit_code: 0 after a clean end, None while running or after a crash.
    """

    name: str
    group: str
    job_type: str
    tags: tuple[str, ...]
    config: dict[str, Any]
    summary: dict[str, Any]
    history: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None


def find_wandb_files(folder: Path) -> list[Path]:
    """Return every ``.wandb`` file below a folder, oldest name first."""
    return sorted(path for path in folder.rglob("run-*.wandb") if not path.is_symlink() and path.is_file())


def read_wandb_run(path: Path, *, history: bool = False) -> WandbRun:
    """Read one ``.wandb`` file.

    Args:
        path: The file.
        history: Whether to read the logged rows too.

    Raises:
        ValueError: If the file holds no run, or W&B's reader fails on it; the message holds what it said.
    """
    summary = json.loads(_inspect(path, "--summary"))
    run: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for line in _inspect(path).splitlines():
        record = json.loads(line)
        if record["type"] == "run":
            run = record["run"]  # the summary has no group and no job type
        elif history and record["type"] == "history":
            rows.append(record["history"]["item"])
    if not run:
        raise ValueError(f"{path} holds no run: was the job stopped before it began?")
    return WandbRun(
        name=summary.get("name", ""),
        group=run.get("run_group", ""),
        job_type=run.get("job_type", ""),
        tags=tuple(run.get("tags", ())),
        config=summary.get("config", {}),
        summary=summary.get("summary", {}),
        history=rows,
        exit_code=summary.get("exit_code"),
    )


def _inspect(path: Path, *options: str) -> str:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", *options, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(f"{path} cannot be read by `wandb leet inspect` (wandb>=0.31): {done.stderr.strip()}")
    return done.stdout
