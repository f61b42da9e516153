"""Who applies momentum and weight decay: borrowed from the optimizer while it steps, given back right after."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_distlab.compression.base import Param

log = logging.getLogger(__name__)

_TAKEN: dict[str, Any] = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}


class MomentumLoan:
    """Lets a compressor apply the momentum and weight decay that the user gave to torch's SGD.

    During `optimizer.step` the param_groups read 0; before and after it they read what the user, or a scheduler such
    as OneCycleLR, wrote there. Checkpoints, monitors and schedulers therefore never see a difference, and every step
    uses the values of the moment.

    Args:
        optimizers: The optimizers of the module.
        params: What the compressor knows of each parameter; their `hyper` is kept up to date.
        names: Name of each parameter, by identity.
        compressor: Name of the compressor, for messages.

    Raises:
        ValueError: An SGD uses dampening or maximize, or another optimizer applies a momentum of its own that would
            act a second time.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], params: Mapping[str, Param], names: Mapping[int, str], compressor: str
    ) -> None:
        self._optimizers = list(optimizers)
        self._params = params
        self._names = names
        self._lent: dict[int, list[dict[str, Any]]] = {}
        self._handles: list[Any] = []
        for optimizer in self._optimizers:
            if isinstance(optimizer, SGD):
                self._check_sgd(optimizer, compressor)
                self._handles += [
                    optimizer.register_step_pre_hook(self._borrow),
                    optimizer.register_step_post_hook(self._give_back),
                ]
            else:
                _check_other(optimizer, compressor)
        self.refresh()

    def _check_sgd(self, optimizer: SGD, compressor: str) -> None:
        for group in optimizer.param_groups:
            if group["dampening"]:
                raise ValueError(
                    f"SGD(dampening={group['dampening']}) cannot move into {compressor}: its momentum correction is "
                    f"defined for dampening 0. Set dampening=0."
                )
            if group["maximize"]:
                raise ValueError(f"SGD(maximize=True) cannot move into {compressor}; negate the loss instead.")
            if group["momentum"] or group["weight_decay"]:
                rank_zero_info(
                    f"{compressor}: momentum={group['momentum']} (nesterov={group['nesterov']}) and weight_decay="
                    f"{group['weight_decay']} of SGD are applied by the compressor; the optimizer's own are 0 while it "
                    f"steps and unchanged otherwise."
                )

    def refresh(self) -> None:
        """Read the param_groups, or what was borrowed from them at the start of a step that is still under way.

        Lightning runs the backward pass inside of `optimizer.step`, so a parameter that was unfrozen just before its
        first step is seen here while the groups are lent.
        """
        for optimizer in self._optimizers:
            if not isinstance(optimizer, SGD):
                continue
            values = self._lent.get(id(optimizer), optimizer.param_groups)
            for group, own in zip(optimizer.param_groups, values, strict=True):
                for weight in group["params"]:
                    param = self._params.get(self._names.get(id(weight), ""))
                    if param is not None:
                        param.hyper.momentum = float(own["momentum"])
                        param.hyper.nesterov = bool(own["nesterov"])
                        param.hyper.weight_decay = float(own["weight_decay"])

    def _borrow(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.refresh()
        self._lent[id(optimizer)] = [{key: group[key] for key in _TAKEN} for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group.update(_TAKEN)

    def _give_back(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group, values in zip(optimizer.param_groups, self._lent.pop(id(optimizer), []), strict=False):
            group.update(values)

    def close(self) -> None:
        """Give everything back, also after a step that raised, and stop watching."""
        for optimizer in self._optimizers:
            self._give_back(optimizer, None, None)
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _check_other(optimizer: Optimizer, compressor: str) -> None:
    """Adam types run with plain error feedback; anything that adds a momentum of its own is refused."""
    for group in optimizer.param_groups:
        if group.get("momentum"):
            raise ValueError(
                f"Momentum would be applied twice: {type(optimizer).__name__} keeps its own momentum="
                f"{group['momentum']}, and {compressor} corrects momentum for torch.optim.SGD only. Use SGD, or set "
                f"the optimizer's momentum to 0."
            )
    rank_zero_warn(
        f"{compressor} with {type(optimizer).__name__}: no momentum correction is defined for it, so gradients get "
        f"plain error feedback, and its second moment sees the spikes of late entries. The method was made for SGD."
    )


def momentum_buffers(states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What a stock SGD's `momentum_buffer` would hold on this rank: local momentum plus that of the weight decay."""
    buffers = {}
    for name, state in states.items():
        parts = [state[key] for key in ("momentum", "decay") if key in state]
        if parts:
            buffers[name] = torch.stack(parts).sum(dim=0) if len(parts) > 1 else parts[0].clone()
    return buffers
