"""What a rank sends instead of its gradient: the contract of every compressor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_distlab.payloads import Reply, Request, RoundSpec

State = dict[str, Tensor]
"""Memory of one parameter on one rank, by the name of what it holds."""


@dataclass
class Hyper:
    """What the optimizer's param_group says about a parameter, read anew at every step.

    Attributes:
        momentum: SGD's momentum factor; 0 where the optimizer keeps its own.
        nesterov: Nesterov's form of it.
        weight_decay: L2 penalty that the compressor applies; 0 where the optimizer does.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0


@dataclass
class Param:
    """A parameter as a compressor sees it.

    Attributes:
        name: Its qualified name, which keys all state.
        weight: The parameter's data, in its own shape (read only).
        hyper: Its optimizer settings.
    """

    name: str
    weight: Tensor
    hyper: Hyper = field(default_factory=Hyper)

    @property
    def flat(self) -> Tensor:
        """The weight as a 1-D view in memory order, [numel], element for element beside its flat gradient."""
        if self.weight.is_contiguous():
            return self.weight.view(-1)
        return self.weight.as_strided((self.weight.numel(),), (1,))


class Scratch:
    """Working memory that is used again and again: one buffer per dtype and device, as large as the largest request."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, torch.device, str], Tensor] = {}

    def take(self, like: Tensor, dtype: torch.dtype | None = None, purpose: str = "") -> Tensor:
        """An uninitialised 1-D tensor of `like.numel()` elements, valid until the next request for this purpose."""
        key = (dtype or like.dtype, like.device, purpose)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < like.numel():
            buffer = torch.empty(like.numel(), dtype=key[0], device=like.device)
            self._buffers[key] = buffer
        return buffer[: like.numel()]

    def raw(self, size: int) -> Tensor:
        """`size` uninitialised bytes in main memory, valid until the next request."""
        key = (torch.uint8, torch.device("cpu"), "raw")
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers[key] = torch.empty(size, dtype=torch.uint8)
        return self._buffers[key][:size]


@dataclass
class Step:
    """What a compressor may know about the optimizer step under way.

    Attributes:
        index: Optimizer steps communicated before this one.
        epoch: Epochs done, as a fraction (2.5 is the middle of the third).
        rank: This rank.
        world_size: Ranks that average.
        seed: Of the run; draw from `generator` to be reproducible whatever the order of buckets.
        scratch: Working memory.
        dense_is_cheaper: Whether sending this density (share of elements) costs more bytes than sending all.
        observed: What `Compressor.observe` returned for this rank.
    """

    index: int
    epoch: float
    rank: int
    world_size: int
    seed: int = 0
    scratch: Scratch = field(default_factory=Scratch)
    dense_is_cheaper: Callable[[float], bool] = lambda density: density >= 1.0
    observed: Any = None


Compression = Generator[Request, Reply, None]
"""A running compression of one tensor on one rank."""


class Compressor(ABC):
    """A method of gradient compression, as a generator of requests; it knows no processes and no collective.

    Attributes:
        name: The word that selects it.
        rounds: What it asks of the ranks, in order, known before any payload exists.
        owns_momentum: Momentum and weight decay of SGD act inside the compressor; the optimizer must not apply them.
        needs_whole_gradient: `observe` has to see all gradients before the first tensor is compressed, which rules out
            overlap with the backward pass.
        fuses: Treats elements one by one, without state and without regard to `Param`: adjacent tensors of a bucket
            may be handed over as one, under the name of the first.
        draws_by_step: Random numbers follow the number of the step, which a checkpoint then holds even without memory.
        refuses_clipping: Why `Trainer(gradient_clip_val=...)` makes no sense with it, or None.
    """

    name: ClassVar[str]
    rounds: tuple[RoundSpec, ...]
    owns_momentum: bool = False
    needs_whole_gradient: bool = False
    fuses: ClassVar[bool] = False
    draws_by_step: ClassVar[bool] = False
    refuses_clipping: str | None = None

    def init_state(self, param: Param) -> State:
        """Memory of `param` at the start: zeros, shaped like the flattened parameter unless said otherwise."""
        return {}

    def observe(self, gradients: Mapping[str, Tensor], states: Mapping[str, State], step: Step) -> Any:
        """Look at this rank before the first tensor of a step; what is returned comes back as `step.observed`.

        Changes nothing.

        Args:
            gradients: This rank's whole gradient by name, 1-D each, where `needs_whole_gradient`; else empty, and
                only what the memories hold from earlier steps can be used.
            states: This rank's memories, by name.
            step: The step that begins.
        """
        return None

    @abstractmethod
    def exchange(self, grad: Tensor, state: State, param: Param, step: Step) -> Compression:
        """Turn this rank's gradient into the average over ranks.

        Up to the final request (`Request.final`) neither `grad` nor `state` may change; behind it the step is known to
        be finite everywhere, the generator updates `state` and writes the average into `grad`, in place. An abandoned
        step closes the generator at its final request, and nothing has happened.

        Args:
            grad: 1-D view of the local gradient, [numel]; finite.
            state: This parameter's memory on this rank.
            param: The parameter.
            step: The step under way.
        """

    def describe(self, params: Mapping[str, Param]) -> str:
        """One line for the log at the start of training: what is compressed, what is left alone, and by which rule."""
        return f"{self.name}: {len(params)} tensors"
