"""The two ways by which gradients reach the exchange engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_distlab.exchange.engine import Engine, Gradients, Outcome
from lightning_distlab.exchange.flat import flat_view
from lightning_distlab.strategies.checks import check_dense


@dataclass
class StepFacts:
    """What the strategy tells an adapter at the start of an exchange.

    Attributes:
        epoch: Epochs done, as a fraction.
        signal: This rank was asked to stop.
        loss_scale: The gradients are this many times too large (fp16 loss scaling); state is kept unscaled.
        weight: Factor by which this rank's gradient enters the mean (loss contract).
    """

    epoch: float = 0.0
    signal: bool = False
    loss_scale: float = 1.0
    weight: float = 1.0


class Adapter(ABC):
    """Feeds an engine with the gradients of a backward pass and leaves the averages where the optimizer looks.

    Args:
        engine: The engine.
        facts: Asked at the start of every exchange.
        names: Name of each parameter, by identity.
    """

    def __init__(self, engine: Engine, facts: Callable[[], StepFacts], names: Mapping[int, str]) -> None:
        self.engine = engine
        self._facts = facts
        self._names = names

    @abstractmethod
    def after_backward(self, parameters: Sequence[nn.Parameter]) -> Outcome:
        """Called when `backward` has returned and the gradients are to be exchanged; they are averages afterwards."""


class BucketAdapter(Adapter):
    """Through DDP's communication hook: the first buckets travel while the backward pass goes on.

    The hook of the last bucket waits for all of them, so that a gradient that is not finite anywhere stops the step
    before DDP hands the averages to the parameters.
    """

    def __init__(
        self, engine: Engine, facts: Callable[[], StepFacts], names: Mapping[int, str], model: DistributedDataParallel
    ) -> None:
        super().__init__(engine, facts, names)
        self._waiting: list[tuple[Tensor, Future[Tensor]]] = []
        self._step = StepFacts()
        self._outcome: Outcome | None = None

        def hook(state: object, bucket: GradBucket) -> Future[Tensor]:
            return self._on_bucket(bucket)

        # DDP compares annotations with types, not with the strings that a postponed evaluation leaves.
        hook.__annotations__.update(bucket=GradBucket)
        hook.__annotations__["return"] = Future[Tensor]
        model.register_comm_hook(None, hook)

    def _on_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        """Send a bucket on its way; its gradients are views of one buffer."""
        if not self._waiting:
            self._step = self._facts()
            self.engine.begin(epoch=self._step.epoch, signal=self._step.signal)
        buffer = bucket.buffer()
        factor = self._step.weight / self._step.loss_scale
        if factor != 1.0:
            buffer.mul_(factor)
        parameters, gradients = bucket.parameters(), bucket.gradients()
        named: dict[str, Tensor | None] = {
            self._names[id(parameter)]: gradient for parameter, gradient in zip(parameters, gradients, strict=True)
        }
        self.engine.submit({self.engine.driver.ranks[0]: named})
        devices: list[int | str | torch.device] = [buffer.device] if buffer.device.type == "cuda" else []
        future: Future[Tensor] = Future(devices=devices)
        self._waiting.append((buffer, future))
        if bucket.is_last():
            self._settle()
        return future

    def _settle(self) -> None:
        """Learn how the step went and release all buckets."""
        waiting, self._waiting = self._waiting, []
        self._outcome = self.engine.finish()
        for buffer, future in waiting:
            if self._step.loss_scale != 1.0:
                _to_scaler(buffer, self._outcome, self._step.loss_scale)
            future.set_result(buffer)

    @override
    def after_backward(self, parameters: Sequence[nn.Parameter]) -> Outcome:
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            raise RuntimeError(
                "The backward pass ended before all gradients were ready, so nothing was exchanged: some parameters "
                "took no part in the loss. Use overlap='after_backward' (strategy.overlap=after_backward), which "
                "allows that, or find_unused_parameters=True."
            )
        if outcome.skipped and self._step.loss_scale == 1.0:
            _drop(parameters)
        return outcome


class NamedAdapter(Adapter):
    """After the backward pass, by name, for one rank.

    Gradients are exchanged in buckets in reverse order of registration, like DDP's first assignment. Parameters
    without a gradient here but with one elsewhere get the average; those without any stay without.

    Args:
        bucket_bytes: Size at which a bucket is closed.
    """

    def __init__(
        self, engine: Engine, facts: Callable[[], StepFacts], names: Mapping[int, str], bucket_bytes: int
    ) -> None:
        super().__init__(engine, facts, names)
        self._bucket_bytes = bucket_bytes

    @override
    def after_backward(self, parameters: Sequence[nn.Parameter]) -> Outcome:
        rank = self.engine.driver.ranks[0]
        own = {self._names[id(parameter)]: parameter for parameter in parameters}
        for name, parameter in own.items():
            check_dense(name, parameter.grad)
        facts = self._facts()
        gradients = {rank: {name: parameter.grad for name, parameter in own.items()}}
        outcome = exchange_named(self.engine, gradients, facts, self._bucket_bytes)
        for name, average in outcome.created.get(rank, {}).items():
            own[name].grad = average
        for name in outcome.absent:
            own[name].grad = None
        if outcome.skipped and facts.loss_scale == 1.0:
            _drop(parameters)
        return outcome


def exchange_named(engine: Engine, gradients: Gradients, facts: StepFacts, bucket_bytes: int) -> Outcome:
    """One whole step of an engine, from the gradients by rank and name. They become averages in place."""
    present = [flat_view(grad) for named in gradients.values() for grad in named.values() if grad is not None]
    factor = facts.weight / facts.loss_scale
    if factor != 1.0:
        for grad in present:
            grad.mul_(factor)
    engine.begin(epoch=facts.epoch, signal=facts.signal)
    if engine.compressor.needs_whole_gradient:
        engine.observe(gradients)
    for names in plan_buckets(engine, next(iter(gradients.values())), bucket_bytes):
        engine.submit({rank: {name: named[name] for name in names} for rank, named in gradients.items()})
    outcome = engine.finish()
    if facts.loss_scale != 1.0:
        for grad in present:
            _to_scaler(grad, outcome, facts.loss_scale)
    return outcome


def plan_buckets(engine: Engine, names: Iterable[str], bucket_bytes: int) -> list[list[str]]:
    """Group tensors of a dtype, last registered first, into buckets of about `bucket_bytes`."""
    buckets: list[list[str]] = []
    filling: dict[torch.dtype, tuple[list[str], int]] = {}
    for name in reversed(list(names)):
        weight = engine.params[name].weight
        bucket, size = filling.get(weight.dtype, ([], 0))
        if not bucket:
            buckets.append(bucket)
        bucket.append(name)
        size += weight.numel() * weight.element_size()
        filling[weight.dtype] = ([], 0) if size >= bucket_bytes else (bucket, size)
    return buckets


def _to_scaler(gradient: Tensor, outcome: Outcome, loss_scale: float) -> None:
    """Hand a gradient back to the loss scaler in its units; after a skipped step so that all scalers see infinity."""
    if outcome.skipped:
        gradient.fill_(float("inf"))
    else:
        gradient.mul_(loss_scale)


def _drop(parameters: Sequence[nn.Parameter]) -> None:
    """Leave the optimizer nothing to do."""
    for parameter in parameters:
        parameter.grad = None
