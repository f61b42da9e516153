"""Virtual ranks: one process plays N data-parallel workers, exactly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler
from typing_extensions import override

from lightning_distlab.exchange.engine import Engine, Outcome
from lightning_distlab.parallel.rng import RankStreams
from lightning_distlab.strategies.adapters import Adapter, StepFacts, exchange_named
from lightning_distlab.strategies.checks import check_dense
from lightning_distlab.strategies.compat import with_sampler
from lightning_distlab.strategies.progress import global_seed
from lightning_distlab.strategies.token_mean import TokenMean


class VirtualBatch(list[Any]):
    """One batch for each virtual rank."""


class VirtualLoader:
    """N data loaders side by side, each with the share of the data that one of N ranks would see.

    Args:
        loader: The user's train loader.
        streams: Random number streams of the ranks; what a loader draws while fetching comes from its rank's.
        ranks: Their number.

    Raises:
        ValueError: The loader cannot be divided by index.
    """

    def __init__(self, loader: DataLoader[Any], streams: RankStreams, ranks: int) -> None:
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            raise ValueError(
                "virtual_ranks needs a train DataLoader over a dataset with a length and indices, to give each rank "
                f"its share; got {type(getattr(loader, 'dataset', loader)).__name__}."
            )
        self.samplers = [_share(loader, rank, ranks) for rank in range(ranks)]
        self.loaders = [with_sampler(loader, own) for own in self.samplers]
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self.num_workers = loader.num_workers
        self._streams = streams

    @property
    def sampler(self) -> VirtualLoader:
        """What Lightning tells the epoch to."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Reshuffle all shares for an epoch."""
        for sampler in self.samplers:
            sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Number of steps; all shares have the same, as under DistributedSampler."""
        return len(self.loaders[0])

    def __iter__(self) -> Iterator[VirtualBatch]:
        """One epoch of batches for all ranks."""
        iterators = []
        for rank, loader in enumerate(self.loaders):
            with self._streams.use(rank):
                iterators.append(iter(loader))
        while True:
            batch = VirtualBatch()
            for rank, iterator in enumerate(iterators):
                with self._streams.use(rank):
                    try:
                        batch.append(next(iterator))
                    except StopIteration:
                        return
            yield batch


def _share(loader: DataLoader[Any], rank: int, ranks: int) -> DistributedSampler[Any]:
    """The sampler of one rank.

    Lightning has made the loader's sampler a distributed one, for the one process there is (a user's own sampler lies
    wrapped inside it); it is made again for N ranks. With `use_distributed_sampler=False` the user's is still there.
    """
    own = loader.sampler
    if isinstance(own, DistributedSampler):
        sampler, source, shuffle, seed, drop = copy.copy(own), own.dataset, own.shuffle, own.seed, own.drop_last
    elif isinstance(own, RandomSampler | SequentialSampler):
        sampler = DistributedSampler.__new__(DistributedSampler)
        source, shuffle, seed, drop = loader.dataset, isinstance(own, RandomSampler), global_seed(), False
    else:
        raise ValueError(
            f"virtual_ranks cannot divide the indices of {type(own).__name__} with use_distributed_sampler=False. "
            f"Leave use_distributed_sampler=True."
        )
    DistributedSampler.__init__(
        sampler, source, num_replicas=ranks, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop
    )
    return sampler


class VirtualAdapter(Adapter):
    """Collects each virtual rank's gradients and exchanges them in one process.

    Args:
        module: The module; its buffers exist once per rank while it trains.
        streams: Random number streams of the ranks.
        bucket_bytes: Size at which a bucket is closed.
    """

    def __init__(
        self,
        engine: Engine,
        facts: Callable[[], StepFacts],
        names: Mapping[int, str],
        module: nn.Module,
        streams: RankStreams,
        bucket_bytes: int,
    ) -> None:
        super().__init__(engine, facts, names)
        self.ranks = engine.driver.ranks
        self.streams = streams
        self._bucket_bytes = bucket_bytes
        self._module = module
        self._gradients: dict[int, dict[str, Tensor | None]] = {rank: {} for rank in self.ranks}
        self._buffers: dict[int, dict[str, Tensor]] = {}
        self._losses: list[Tensor] = []
        self._carrier: Tensor | None = None
        self.spread_buffers()

    def spread_buffers(self) -> None:
        """Give every rank a copy of the module's buffers as they are now."""
        self._buffers = {rank: {n: b.clone() for n, b in self._module.named_buffers()} for rank in self.ranks}

    def average_buffers(self) -> None:
        """Put the mean of all ranks' floating-point buffers into the module, and spread it."""
        for name, buffer in self._module.named_buffers():
            if buffer.is_floating_point():
                total = sum(self._buffers[rank][name].to(torch.float64) for rank in self.ranks)
                assert isinstance(total, Tensor)
                buffer.copy_((total / len(self.ranks)).to(buffer.dtype))
            else:
                buffer.copy_(self._buffers[self.ranks[0]][name])
        self.spread_buffers()

    def training_step(self, step: Callable[..., Any], mean: TokenMean, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """`training_step` once per rank; the loss returned stands for all of them in Lightning's loop.

        Args:
            step: The training step of one rank.
            mean: The run's loss contract.
            batch: One batch per rank.
            *args: Further arguments of the step.
            **kwargs: Further arguments of the step.
        """
        outputs = [
            self.forward_as(rank, partial(step, own, *args, **kwargs))
            for rank, own in zip(self.ranks, batch, strict=True)
        ]
        self._losses = [mean.read(output, rank) for rank, output in zip(self.ranks, outputs, strict=True)]
        self._carrier = torch.stack([loss.detach() for loss in self._losses]).mean().requires_grad_()
        return {**outputs[0], "loss": self._carrier} if isinstance(outputs[0], Mapping) else self._carrier

    def backward(
        self, run: Callable[[Tensor], Any], loss: Tensor, mean: TokenMean, parameters: Sequence[nn.Parameter]
    ) -> None:
        """Each rank's backward pass.

        Args:
            run: Back-propagates a loss.
            loss: What Lightning made of the loss that `training_step` returned; its factor goes onto each rank's.
            mean: The run's loss contract.
            parameters: Whose gradients are collected.
        """
        assert self._carrier is not None
        (scale,) = torch.autograd.grad(loss, self._carrier)
        for rank, own in zip(self.ranks, self._losses, strict=True):
            run(mean.weigh(own * scale, rank))
            self.collect(rank, parameters)
        self._losses, self._carrier = [], None

    def forward_as(self, rank: int, step: Callable[[], Any]) -> Any:
        """Run a training step as one rank: its random numbers, its buffers."""
        with self.streams.use(rank):
            self._swap_buffers(rank)
            try:
                return step()
            finally:
                self._swap_buffers(rank)

    def _swap_buffers(self, rank: int) -> None:
        """Exchange the module's buffers with a rank's. Pointers move, not values: autograd may hold the old ones."""
        own = self._buffers[rank]
        for name, buffer in list(self._module.named_buffers()):
            path, _, leaf = name.rpartition(".")
            holder = self._module.get_submodule(path)
            own[name], holder._buffers[leaf] = buffer, own[name]

    def collect(self, rank: int, parameters: Sequence[nn.Parameter]) -> None:
        """Take the gradients of a backward pass away from the parameters and add them to a rank's own."""
        own = self._gradients[rank]
        for parameter in parameters:
            name = self._names[id(parameter)]
            gradient, parameter.grad = parameter.grad, None
            check_dense(name, gradient)
            before = own.get(name)
            if gradient is not None and before is not None:
                before.add_(gradient)
            elif before is None:
                own[name] = gradient

    @override
    def after_backward(self, parameters: Sequence[nn.Parameter]) -> Outcome:
        facts = self._facts()
        outcome = exchange_named(self.engine, self._gradients, facts, self._bucket_bytes)
        first = self.ranks[0]
        created = outcome.created.get(first, {})
        for parameter in parameters:
            name = self._names[id(parameter)]
            keep = not outcome.skipped or facts.loss_scale != 1.0
            parameter.grad = (created.get(name, self._gradients[first].get(name))) if keep else None
            if name in outcome.absent:
                parameter.grad = None
        self._gradients = {rank: {} for rank in self.ranks}
        return outcome
