"""The command line that starts one more rank of the program which is running now.

Under Hydra the original ``sys.argv`` must not be repeated: with ``-m`` every rank would start the whole sweep again,
and a sampling sweeper would hand each rank other values. So the command is made of what Hydra composed for *this* job.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable

from hydra.core.hydra_config import HydraConfig
from hydra.utils import to_absolute_path
from omegaconf import OmegaConf

# Settings that say where a job runs or how a sweep is spread. A child gets its own values for these.
_OWNED: tuple[str, ...]
_OWNED = (
    "hydra.run.",
    "hydra.sweep.",
    "hydra.mode",
    "hydra.output_subdir",
    "hydra.job.name",
    "hydra.job.num",
)
_OWNED += ("hydra.job.id", "hydra.sweeper", "hydra/sweeper", "hydra.launcher", "hydra/launcher")


def child_command(local_rank: int) -> tuple[list[str], str | None]:
    """Return the command and the working directory (None: inherit) for the child with this local rank."""
    if HydraConfig.initialized():
        return _hydra_command(local_rank)
    return [*_program(os.path.abspath(sys.argv[0])), *sys.argv[1:]], None


def _program(script: str) -> list[str]:
    import __main__  # a late import: the module differs between a script, a console entry and a test runner

    if __main__.__spec__ is None:
        return [sys.executable, script]
    return [sys.executable, "-m", __main__.__spec__.name]


def _hydra_command(local_rank: int) -> tuple[list[str], str]:
    hydra = HydraConfig.get()
    command = [*_program(to_absolute_path(sys.argv[0])), *_config_flags()]
    command += list(hydra.overrides.task)
    command += _forwarded(hydra.overrides.hydra)
    command += [
        "hydra.mode=RUN",
        f"hydra.run.dir={quoted(hydra.runtime.output_dir)}",
        "hydra.output_subdir=null",  # rank 0 alone writes .hydra/
        f"hydra.job.name=rank{local_rank}",
    ]
    # a job of a sweep may use its number in the configuration; a plain run has none
    for key in ("num", "id"):
        if not OmegaConf.is_missing(hydra.job, key):
            command.append(f"hydra.job.{key}={getattr(hydra.job, key)}")
    return command, str(hydra.runtime.cwd)


def _config_flags() -> list[str]:
    """Return the flags that make a child read the same primary configuration from the same places."""
    hydra = HydraConfig.get()
    flags = []
    for source in hydra.runtime.config_sources:
        path = f"pkg://{source.path}" if source.schema == "pkg" else str(source.path)
        if source.provider == "main" and source.path:
            flags += ["--config-path", path]
        elif source.provider == "command-line":
            flags += ["--config-dir", path]
    if hydra.job.config_name is not None:
        flags += ["--config-name", str(hydra.job.config_name)]
    return flags


def _forwarded(overrides: Iterable[str]) -> list[str]:
    """Keep the user's hydra overrides (logging, search path, chdir, ...) apart from those a child sets itself."""
    return [item for item in overrides if not item.lstrip("+~").startswith(_OWNED)]


def quoted(value: str) -> str:
    """Quote a value for Hydra's override grammar: spaces, ``=``, commas and quotes survive."""
    # in quotes a backslash is itself, unless a quote or an interpolation follows the run of backslashes
    escaped = re.sub(r"(\\*)(\"|\$\{|$)", lambda match: 2 * match[1] + ("\\" + match[2] if match[2] else ""), value)
    return f'"{escaped}"'
