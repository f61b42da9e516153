"""Everything private in Lightning that we lean on, one documented function each, one test each.

Written against Lightning 2.6.6. When Lightning changes one of these, the test of that name fails, and this is the only
file to mend.
"""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import lightning
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

SUPPORTED = ((2, 6, 6), (2, 7, 0))
"""Versions of Lightning from, and below."""


def check_lightning_version(version: str) -> None:
    """Refuse a Lightning whose private parts we do not know.

    Raises:
        ImportError: If the version lies outside `SUPPORTED`.
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    number = tuple(int(part or 0) for part in found.groups()) if found else (0, 0, 0)
    if not SUPPORTED[0] <= number < SUPPORTED[1]:
        raise ImportError(
            f"lightning {version} is installed, but lightning_distlab relies on internals of lightning >= 2.6.6, "
            "< 2.7: pip install 'lightning>=2.6.6,<2.7'"
        )


check_lightning_version(lightning.__version__)


class _DeferredSigterm:
    """Stands in for the parts of Lightning that talk to other ranks about SIGTERM, on the instances of one Trainer.

    Lightning 2.5.2 to 2.6.6 broadcasts a flag from rank 0 before every training batch, and once more inside the signal
    handler, where a collective may be under way already. Here a signal is only noted; the strategy tells the others in
    the headers of its next exchange, and all stop after the same step.

    Args:
        trainer: The Trainer that runs a fit.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer = trainer
        self.pending = False
        self.theirs = trainer._signal_connector._sigterm_notifier_fn

    def install(self) -> None:
        """Put both parts in place, also where Lightning has registered its signal handlers already."""
        epoch_loop: Any = self.trainer.fit_loop.epoch_loop
        connector: Any = self.trainer._signal_connector
        epoch_loop._broadcast_sigterm_tensor = _say_nothing
        connector._sigterm_notifier_fn = self.note
        _exchange_handler(self.theirs, self.note)

    def remove(self) -> None:
        """Give Lightning its own back."""
        self.trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)
        self.trainer._signal_connector.__dict__.pop("_sigterm_notifier_fn", None)
        _exchange_handler(self.note, self.theirs)

    def note(self, signum: int, _: FrameType | None) -> None:
        """The signal handler: pass the signal on to processes that this one has started, and remember it."""
        log.info("SIGTERM received: this rank tells the others at the next exchange, then all stop")
        launcher = self.trainer.strategy.launcher
        if not self.pending and launcher is not None:
            launcher.kill(signum)
        self.pending = True


def _say_nothing() -> None:
    """Takes the place of the broadcast before every batch."""


def _exchange_handler(old: Any, new: Any) -> None:
    """Swap one function inside the composed handler that Lightning has registered for SIGTERM, if it has."""
    handlers = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", None)
    if isinstance(handlers, list):
        handlers[:] = [new if handler == old else handler for handler in handlers]


def silence_sigterm_broadcast(trainer: pl.Trainer) -> None:
    """Stop Lightning from communicating before every batch of a fit; SIGTERM then waits for the strategy's word.

    Call it in `Strategy.setup`, read `received_sigterm` at every exchange, call `request_stop` on all ranks once any
    rank has it, and `restore_sigterm_broadcast` in `teardown`. With one rank, and outside of fit, nothing changes:
    there Lightning's own handling stops at once.
    """
    from lightning.pytorch.trainer.states import TrainerFn

    restore_sigterm_broadcast(trainer)
    if trainer.world_size > 1 and trainer.state.fn == TrainerFn.FITTING:
        deferred = _DeferredSigterm(trainer)
        deferred.install()
        vars(trainer._signal_connector)["_distlab_deferred"] = deferred


def restore_sigterm_broadcast(trainer: pl.Trainer) -> None:
    """Undo `silence_sigterm_broadcast`; harmless without it. A signal noted meanwhile is handed over to Lightning."""
    deferred = trainer._signal_connector.__dict__.pop("_distlab_deferred", None)
    if deferred is not None:
        deferred.remove()
        trainer._signal_connector.received_sigterm |= deferred.pending


def received_sigterm(trainer: pl.Trainer) -> bool:
    """Whether this rank was asked to stop: by a signal that it has only noted so far, or for good."""
    deferred = vars(trainer._signal_connector).get("_distlab_deferred")
    return bool(trainer.received_sigterm or (deferred is not None and deferred.pending))


def request_stop(trainer: pl.Trainer) -> None:
    """Make this rank stop as Lightning does after SIGTERM: `SIGTERMException` at the end of the present batch.

    All ranks must call it in the same step, or those left wait for the others.
    """
    trainer._signal_connector.received_sigterm = True


def with_sampler(dataloader: object, sampler: Sampler[Any] | Iterable[Any]) -> DataLoader[Any]:
    """The same DataLoader with another sampler, made by Lightning's helper that knows subclasses and batch samplers.

    Args:
        dataloader: Subclasses keep their own arguments if Lightning has seen them made (inside a `*_dataloader` hook)
            or they store them under the same names.
        sampler: Yields indices of the dataset.

    Raises:
        ValueError: If it is no DataLoader, has an IterableDataset, or cannot be made again.
    """
    from lightning.fabric.utilities.data import _reinstantiate_wrapped_cls
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.utilities.data import _get_dataloader_init_args_and_kwargs

    if not isinstance(dataloader, DataLoader):
        raise ValueError(
            f"a training set of type {type(dataloader).__name__} cannot be given another sampler: return a "
            "torch.utils.data.DataLoader from train_dataloader"
        )
    if isinstance(dataloader.dataset, IterableDataset):
        raise ValueError(
            f"{type(dataloader.dataset).__name__} is an IterableDataset and has no sampler, so it cannot be dealt out "
            "to several ranks: use a dataset with __getitem__ and __len__, or cut the stream by rank inside the "
            "dataset and run real ranks"
        )
    try:
        args, kwargs = _get_dataloader_init_args_and_kwargs(dataloader, sampler)
        given = dataloader.batch_sampler
        if type(given) is BatchSampler and dataloader.batch_size is None:
            # the user passed a plain BatchSampler; Lightning would forget its batch size and load single samples
            again = BatchSampler(sampler, given.batch_size, given.drop_last)
            kwargs |= {"sampler": None, "batch_sampler": again, "batch_size": 1, "drop_last": False}
        made: DataLoader[Any] = _reinstantiate_wrapped_cls(dataloader, *args, **kwargs)
    except (MisconfigurationException, TypeError) as error:
        raise ValueError(
            f"{type(dataloader).__name__} cannot be made again with another sampler: {str(error).strip()} (Its batch "
            "sampler must take sampler, batch_size and drop_last; a DataLoader subclass must store its arguments.)"
        ) from error
    if made.worker_init_fn is None:
        made.worker_init_fn = dataloader.worker_init_fn
    return made


def accumulation_factor(trainer: pl.Trainer) -> int:
    """The number that Lightning divides each loss by *now*; `GradientAccumulationScheduler` changes it between epochs.

    It divides by this number also in a last window of fewer micro-batches.
    """
    return int(trainer.accumulate_grad_batches)


def publish_metrics(trainer: pl.Trainer, metrics: Mapping[str, float]) -> None:
    """Put numbers into `callback_metrics`, `logged_metrics` and all loggers where `self.log` is not allowed."""
    connector = trainer._logger_connector
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}
    connector._callback_metrics.update(tensors)
    connector._logged_metrics.update(tensors)
    connector.log_metrics(tensors)
