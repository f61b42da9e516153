"""Typed schemas of the strategy configurations: names, types and words are checked before anything is built.

Ranges and what settings mean together are checked once, by the class that owns the value: they hold without Hydra too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hydra.core.config_store import ConfigStore


class StartMethod(Enum):
    """How ranks are started on one machine."""

    popen = "popen"
    fork = "fork"
    spawn = "spawn"
    forkserver = "forkserver"


@dataclass
class LightningDDPConf:
    """Options of Lightning's own DDP."""

    _target_: str = "lightning_distlab.strategies.stock_ddp.LightningDDP"
    start_method: str = "popen"
    timeout_s: float = 1800.0
    process_group_backend: str | None = None
    find_unused_parameters: bool = False


def register_schemas() -> None:
    """Put the schemas into Hydra's store, in groups below ``schema/``, where they are no options of ``strategy=``."""
    store = ConfigStore.instance()
    store.store(group="schema/strategy", name="lightning_ddp", node=LightningDDPConf)
