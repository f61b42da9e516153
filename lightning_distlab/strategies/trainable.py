"""Which parameters take part, asked at every step without walking through the module every time."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_distlab.compression.base import Param
from lightning_distlab.exchange.engine import Engine


class Trainable:
    """The parameters of a module that require gradients, by name, in order of registration.

    A walk through a module with its names costs as much as the forward pass of a small network. Here only identities
    are compared with those of the walk before; whatever was added, removed, exchanged, frozen or unfrozen since leads
    to a new one.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._modules: list[nn.Module] = []
        self._seen: list[object] = []
        self._all: list[tuple[str, nn.Parameter]] = []
        self._required: list[bool] = []
        self._named: dict[str, nn.Parameter] = {}

    def named(self) -> dict[str, nn.Parameter]:
        """By name; not to be changed."""
        if not self._is_as_before():
            self._modules = list(self.module.modules())
            self._seen = self._children()
            self._all = list(self.module.named_parameters())
            self._required, self._named = [], {}
        required = [parameter.requires_grad for _, parameter in self._all]
        if required != self._required:
            self._required = required
            self._named = {name: parameter for name, parameter in self._all if parameter.requires_grad}
        return self._named

    def _is_as_before(self) -> bool:
        seen = self._children()
        return bool(self._modules) and len(seen) == len(self._seen) and all(map(operator.is_, seen, self._seen))

    def _children(self) -> list[object]:
        """All that hangs on the modules of the latest walk."""
        found: list[object] = []
        for module in self._modules:
            found += module._parameters.values()
            found += module._modules.values()
        return found


def follow(
    engine: Engine, trainable: Mapping[str, nn.Parameter], names: dict[int, str], fixed: bool, drop: bool
) -> None:
    """Bring an engine's parameters up to date with those that require gradients.

    Args:
        engine: The engine.
        trainable: The parameters that require gradients now, by name.
        names: Name of each parameter, by identity; brought up to date too.
        fixed: DDP's reducer feeds the engine, and it does not see new parameters.
        drop: Forget the memory of parameters that were frozen.

    Raises:
        RuntimeError: There are new ones, and the set is fixed.
    """
    if trainable.keys() == engine.params.keys():
        return
    new = [name for name in trainable if name not in engine.params]
    if new and fixed:
        raise RuntimeError(
            f"{len(new)} parameters were unfrozen after training started ({', '.join(sorted(new)[:3])}...), which "
            f"DDP's reducer does not see. Use overlap='after_backward' (strategy.overlap=after_backward)."
        )
    if drop and not fixed:
        for name in engine.params.keys() - trainable.keys():
            engine.unregister(name)
    for name in new:
        engine.register(Param(name, trainable[name].detach()))
        names[id(trainable[name])] = name
    if new:
        rank_zero_info(f"{engine.compressor.name}: {len(new)} unfrozen parameters take part from now on.")


def gradients_as_views(module: nn.Module) -> bool:
    """Whether gradients had better be views of DDP's buckets: it spares a copy of them, in memory and time.

    On CPUs a convolution's backward pass writes its weight gradient in a layout of its own, and a fixed place in a
    bucket costs it a copy more than is spared.
    """
    return not any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules())
