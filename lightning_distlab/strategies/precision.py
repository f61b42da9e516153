"""Lightning's precision plugins with clipping that sees all mesh axes.

Lightning has no hook for clipping in a strategy: the module calls the precision plugin. So a strategy that cuts the
model installs one of these, made by `mesh_precision`, and names the groups once they exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch.distributed as dist
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_distlab.parallel.clipping import clip_grad_norm_, clip_grad_value_


class MeshClipping(Precision):
    """Mixed in before a precision plugin: its clipping becomes ours.

    Attributes:
        reduce_over: Groups whose ranks hold different parameters; a strategy assigns them in `setup_environment`.
        counted: Which parameters this rank answers for, where they lie on several of those ranks.
    """

    reduce_over: Sequence[dist.ProcessGroup] = ()
    counted: Callable[[Tensor], bool] | None = None

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_grad_value_(self.main_params(optimizer), clip_val)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_grad_norm_(self.main_params(optimizer), clip_val, reduce_over=self.reduce_over, counted=self.counted)


class MeshPrecision(MeshClipping, Precision):
    """``32-true`` with clipping across mesh axes."""


class MeshMixedPrecision(MeshClipping, MixedPrecision):
    """``bf16-mixed`` or ``16-mixed`` with clipping across mesh axes."""


class MeshHalfPrecision(MeshClipping, HalfPrecision):
    """``bf16-true`` or ``16-true`` with clipping across mesh axes."""


class MeshDoublePrecision(MeshClipping, DoublePrecision):
    """``64-true`` with clipping across mesh axes."""


def mesh_precision(plugin: Precision) -> MeshClipping:
    """The mesh-aware twin of a plugin that Lightning made from ``Trainer(precision=...)``.

    Raises:
        ValueError: If it is a plugin of another kind: we cannot know how that one clips.
    """
    if isinstance(plugin, MeshClipping):
        return plugin
    kind: type[Precision] = type(plugin)
    if kind is Precision:
        return MeshPrecision()
    if kind is DoublePrecision:
        return MeshDoublePrecision()
    if isinstance(plugin, HalfPrecision) and kind is HalfPrecision:
        return MeshHalfPrecision(plugin.precision)
    if isinstance(plugin, MixedPrecision) and kind is MixedPrecision:
        precision: Literal["16-mixed", "bf16-mixed"] = "16-mixed" if plugin.precision == "16-mixed" else "bf16-mixed"
        return MeshMixedPrecision(precision, plugin.device, plugin.scaler)
    raise ValueError(
        f"{kind.__name__} cannot be clipped across mesh axes: use precision='32-true', 'bf16-mixed', '16-mixed', "
        "'bf16-true', '16-true' or '64-true', or a plugin of your own derived from MeshClipping"
    )
