"""Residuals and momenta of all ranks in a checkpoint, and back out of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distlab.compression.base import State

KEY = "lightning_distlab"
"""Where the state lies in a Lightning checkpoint."""

States = Mapping[str, State]


def gather_states(states: States, rank: int, world_size: int, device: torch.device) -> dict[str, States] | None:
    """Every rank's state on rank 0, on the CPU; None on the others.

    Sent as plain bytes behind a JSON description; nothing is unpickled.
    """
    if rank != 0:
        description, body = _pack(states)
        header = torch.frombuffer(bytearray(description), dtype=torch.uint8)
        dist.send(torch.tensor([header.numel(), body.numel()], dtype=torch.int64, device=device), 0)
        dist.send(header.to(device), 0)
        if body.numel():
            dist.send(body.to(device), 0)
        return None
    ranks: dict[str, States] = {"0": _to_cpu(states)}
    for peer in range(1, world_size):
        sizes = torch.empty(2, dtype=torch.int64, device=device)
        dist.recv(sizes, peer)
        header = torch.empty(int(sizes[0]), dtype=torch.uint8, device=device)
        body = torch.empty(int(sizes[1]), dtype=torch.uint8, device=device)
        dist.recv(header, peer)
        if body.numel():
            dist.recv(body, peer)
        ranks[str(peer)] = _unpack(bytes(header.cpu().numpy()), body.cpu())
    return ranks


def mean_state(ranks: Sequence[States]) -> dict[str, State]:
    """The mean over ranks, summed in fp64: what every rank gets when their number changed.

    The mean of the residuals is what the average model has not seen yet, so it is kept whatever the new number.
    """
    mean: dict[str, State] = {}
    for name, state in ranks[0].items():
        mean[name] = {}
        for key, first in state.items():
            if not first.is_floating_point():
                mean[name][key] = first.clone()
                continue
            total = torch.zeros_like(first, dtype=torch.float64)
            for other in ranks:
                if key in other.get(name, {}):
                    total += other[name][key]
            mean[name][key] = (total / len(ranks)).to(first.dtype)
    return mean


def states_for(saved: Mapping[str, Any], ranks: Sequence[int], world_size: int) -> dict[int, dict[str, State]]:
    """What each of `ranks` starts with.

    Args:
        saved: What `save` put into the checkpoint.
        ranks: The ranks of this process.
        world_size: Ranks of this run.

    Raises:
        ValueError: The checkpoint lacks the state of one of its ranks.
    """
    if "mean" in saved:
        return {rank: {name: dict(state) for name, state in saved["mean"].items()} for rank in ranks}
    missing = [r for r in range(saved["world_size"]) if str(r) not in saved["ranks"]]
    if missing:
        raise ValueError(
            f"The checkpoint was saved by {saved['world_size']} ranks, but the communication state of rank "
            f"{', '.join(map(str, missing))} is missing: residuals would be lost. Use an intact checkpoint, or resume "
            f"without this state by comm_state='reset' (strategy.comm_state=reset)."
        )
    if saved["world_size"] == world_size:
        return {rank: saved["ranks"][str(rank)] for rank in ranks}
    mean = mean_state([saved["ranks"][str(r)] for r in range(saved["world_size"])])
    return dict.fromkeys(ranks, mean)


def _to_cpu(states: States) -> dict[str, State]:
    return {name: {key: value.detach().cpu().clone() for key, value in s.items()} for name, s in states.items()}


def _pack(states: States) -> tuple[bytes, Tensor]:
    """A JSON description [[name, key, dtype, shape], ...] and the bytes of the tensors, one after the other."""
    description, pieces = [], []
    for name, state in states.items():
        for key, value in state.items():
            description.append([name, key, str(value.dtype).removeprefix("torch."), list(value.shape)])
            pieces.append(value.detach().cpu().contiguous().view(-1).view(torch.uint8))
    header = json.dumps({"names": list(states), "tensors": description}).encode()
    return header, torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


def _unpack(header: bytes, body: Tensor) -> dict[str, State]:
    """The inverse of `_pack`."""
    description = json.loads(header)
    states: dict[str, State] = {name: {} for name in description["names"]}
    start = 0
    for name, key, dtype_name, shape in description["tensors"]:
        dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        states[name][key] = body[start : start + size].clone().view(dtype).view(shape)
        start += size
    return states
