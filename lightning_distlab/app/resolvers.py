"""The OmegaConf resolvers of our configuration files: names of things, and one time stamp for all ranks."""

from __future__ import annotations

import functools
import os
from datetime import datetime, timedelta

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf


def register_resolvers() -> None:
    """Register `run_stamp`, `rank0_only`, `rank_file`, `strategy_name` and `recipe_name`; twice does no harm."""
    OmegaConf.register_new_resolver("run_stamp", run_stamp, replace=True)
    OmegaConf.register_new_resolver("rank0_only", lambda value: value if _torchrun_rank() == 0 else None, replace=True)
    OmegaConf.register_new_resolver("rank_file", _rank_file, replace=True)
    OmegaConf.register_new_resolver("strategy_name", strategy_name, replace=True)
    OmegaConf.register_new_resolver("recipe_name", recipe_name, replace=True)


@functools.cache
def run_stamp() -> str:
    """Return the time at which this run began, to the millisecond, the same on all ranks.

    Under torchrun each rank composes its own configuration, seconds apart. So rank 0 publishes its stamp in the agent's
    key-value store and the others read it there.

    Raises:
        ValueError: If torchrun serves no store and no run id that ranks could agree on.
    """
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")[:-3]
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return stamp
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _agree(stamp)
    run_id = os.environ["TORCHELASTIC_RUN_ID"]
    if run_id == "none":
        raise ValueError(
            "torchrun gives ranks no common name for the run: pass --standalone, --rdzv-id, or hydra.run.dir="
        )
    return run_id


def _agree(stamp: str) -> str:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timedelta(minutes=5))
    # a restart after a failure is a new run with a folder of its own
    key = f"lightning_distlab/run_stamp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if _torchrun_rank() == 0:
        store.set(key, stamp)
    return str(store.get(key).decode())


def _torchrun_rank() -> int:
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def _rank_file(name: str) -> str:
    rank = _torchrun_rank()
    return name if rank == 0 else f"{name}-rank{rank}"


def _choice(group: str) -> str | None:
    choice = HydraConfig.get().runtime.choices.get(group)
    return None if choice is None else str(choice)


def strategy_name() -> str:
    """Return the word behind ``strategy=``; for the general ``compressed`` one its two parts."""
    name = _choice("strategy")
    if name == "compressed":
        return f"{_choice('strategy/compressor')}_{_choice('strategy/collective')}"
    return name or "none"


def recipe_name() -> str:
    """Return what is trained: the experiment, or else the model, which names its data as a rule."""
    return _choice("experiment") or _choice("model") or "custom"
