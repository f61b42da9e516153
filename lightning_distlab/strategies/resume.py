"""A compressed run's checkpoints: its own state beside Lightning's, and momentum that a stock Trainer resumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_distlab.exchange.engine import Engine
from lightning_distlab.exchange.flat import flat_view, shaped_view
from lightning_distlab.strategies.comm_state import gather_states, mean_state, states_for
from lightning_distlab.strategies.momentum import momentum_buffers

FORMAT = 1


def _has_memory(engine: Engine) -> bool:
    """Some tensor's compressor keeps something from step to step."""
    return any(engine.states[engine.driver.ranks[0]].values())


def save_engine(engine: Engine, mode: str, device: torch.device) -> dict[str, Any] | None:
    """An engine's state for a checkpoint, on rank 0; None on the others, with `drop`, and for methods without memory.

    All ranks call this together.
    """
    if mode == "drop" or not (_has_memory(engine) or engine.compressor.draws_by_step):
        return None
    if len(engine.driver.ranks) > 1:
        ranks: dict[str, Any] | None = {str(rank): engine.state_dict(rank) for rank in engine.driver.ranks}
    else:
        rank = engine.driver.ranks[0]
        ranks = gather_states(engine.state_dict(rank), rank, engine.driver.world_size, device)
    if ranks is None:
        return None
    saved: dict[str, Any] = {
        "format": FORMAT,
        "compressor": engine.compressor.name,
        "world_size": engine.driver.world_size,
        "steps": engine.steps_done,
    }
    if mode == "mean":
        return {**saved, "mean": mean_state(list(ranks.values()))}
    return {**saved, "ranks": ranks}


def restore_engine(engine: Engine, saved: Mapping[str, Any] | None, mode: str) -> None:
    """Put a checkpoint's communication state back.

    Raises:
        ValueError: There is none, it belongs to another compressor, or a rank's share is missing.
    """
    if mode in ("reset", "drop"):
        return
    if not _has_memory(engine) and (saved is None or saved["compressor"] != engine.compressor.name):
        return  # nothing to go on from, and nothing needed
    remedy = "Set comm_state='reset' (strategy.comm_state=reset) to start with empty residuals."
    if saved is None:
        raise ValueError(
            f"The checkpoint holds no communication state (residuals, momenta), which {engine.compressor.name} needs "
            f"to go on exactly. {remedy}"
        )
    if saved["compressor"] != engine.compressor.name:
        raise ValueError(
            f"The checkpoint's communication state belongs to {saved['compressor']!r}, this run compresses with "
            f"{engine.compressor.name!r}. {remedy}"
        )
    for rank, states in states_for(saved, engine.driver.ranks, engine.driver.world_size).items():
        unknown = states.keys() - engine.params.keys()
        if unknown:
            rank_zero_warn(f"Communication state of {len(unknown)} frozen or removed parameters was left out.")
        device = next(iter(engine.params.values())).weight.device
        known = {name: state for name, state in states.items() if name in engine.params}
        engine.load_state(rank, {n: {key: value.to(device) for key, value in s.items()} for n, s in known.items()})
    engine.steps_done = int(saved["steps"])


def stock_optimizer_state(
    state: dict[str, Any], optimizer: Optimizer, engine: Engine, names: Mapping[int, str], device: torch.device
) -> dict[str, Any]:
    """An optimizer state dict in which SGD's momentum stands where a stock Trainer looks for it.

    The buffer is the mean over ranks of the local momenta, plus that of the weight decay. All ranks call this together.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return state
    total: dict[str, Tensor] = {}
    for rank in engine.driver.ranks:
        for name, buffer in momentum_buffers(engine.state_dict(rank)).items():
            total[name] = total[name] + buffer if name in total else buffer
    if len(engine.driver.ranks) == 1 and engine.driver.world_size > 1:
        for name in sorted(total):
            dist.all_reduce(total[name])
    entries = dict(state["state"])
    for index, weight in _indexed(optimizer):
        name = names.get(id(weight), "")
        if name in total:
            mean = total[name] / engine.driver.world_size
            own = dict(entries.get(index, {}))
            own["momentum_buffer"] = shaped_view(mean.to(weight.dtype), weight).clone()
            entries[index] = own
    return {**state, "state": entries}


def take_optimizer_state(
    checkpoint: Mapping[str, Any],
    optimizers: Sequence[Optimizer],
    engine: Engine,
    names: Mapping[int, str],
    has_state: bool,
) -> Mapping[str, Any]:
    """A checkpoint whose SGD momentum buffers moved into the engine, which applies momentum in this run.

    Args:
        checkpoint: As loaded.
        optimizers: The optimizers.
        engine: The engine; its momenta start from the buffers unless its own state was restored.
        names: Name of each parameter, by identity.
        has_state: The engine's own state was restored.
    """
    states = []
    for optimizer, saved in zip(optimizers, checkpoint["optimizer_states"], strict=False):
        if not isinstance(optimizer, torch.optim.SGD):
            states.append(saved)
            continue
        entries = {}
        for index, weight in _indexed(optimizer):
            own = dict(saved["state"].get(index, {}))
            buffer = own.pop("momentum_buffer", None)
            if own:
                entries[index] = own
            if buffer is None or has_state:
                continue
            for rank in engine.driver.ranks:
                state = engine.state_dict(rank).get(names.get(id(weight), ""), {})
                if "momentum" in state:
                    state["momentum"].copy_(flat_view(buffer.to(weight.device)))
        states.append({**saved, "state": entries})
    return {**checkpoint, "optimizer_states": states}


def _indexed(optimizer: Optimizer) -> list[tuple[int, Tensor]]:
    """Parameters with the index that torch's state_dict gives them."""
    return list(enumerate(weight for group in optimizer.param_groups for weight in group["params"]))
