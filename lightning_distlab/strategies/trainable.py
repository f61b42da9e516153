"""Which parameters take part, asked at every step without walking through the module every time."""

from __future__ import annotations

import operator

from torch import nn


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
