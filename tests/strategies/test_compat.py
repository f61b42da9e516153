"""One test for each private hook of Lightning: it fails when Lightning changes the hook, not when we change our use."""

import os
import signal

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from lightning_distlab.strategies import compat
from tests.helpers.fork import fork_ranks

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@pytest.mark.parametrize("version", ["2.6.6", "2.6.7.dev0", "2.6.12"])
def test_versions_that_we_know(version):
    compat.check_lightning_version(version)


@pytest.mark.parametrize("version", ["2.6.5", "2.7.0", "2.7.0rc1", "2.7", "3.0.0", "1.9.5", "unknown"])
def test_other_versions_are_refused_with_the_remedy(version):
    with pytest.raises(ImportError, match=r"lightning .* is installed.*pip install 'lightning>=2\.6\.6,<2\.7'"):
        compat.check_lightning_version(version)


class SilentDDP(DDPStrategy):
    """What a strategy of ours does about SIGTERM, on top of Lightning's DDP; the exchange is one all_reduce."""

    def setup(self, trainer):
        super().setup(trainer)
        compat.silence_sigterm_broadcast(trainer)

    def optimizer_step(self, optimizer, closure, model=None, **kwargs):
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        trainer = self.lightning_module.trainer
        flag = torch.tensor([compat.received_sigterm(trainer)], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item():
            compat.request_stop(trainer)
        return result

    def teardown(self):
        compat.restore_sigterm_broadcast(self.lightning_module.trainer)
        super().teardown()


class Watch(Callback):
    """Counts Lightning's broadcasts and notes where each rank stopped; sends itself a signal on request."""

    def __init__(self, signal_rank=None, at=2):
        self.signal_rank = signal_rank
        self.at = at
        self.batches = 0
        self.broadcasts = 0

    def on_fit_start(self, trainer, pl_module):
        self.original = dist.broadcast

        def counted(*args, **kwargs):
            self.broadcasts += 1
            return self.original(*args, **kwargs)

        dist.broadcast = counted

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == self.signal_rank and batch_idx == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
            assert not trainer.received_sigterm or not isinstance(trainer.strategy, SilentDDP)

    def on_train_batch_end(self, *args):
        self.batches += 1

    def on_train_end(self, trainer, pl_module):
        if trainer.global_rank == self.signal_rank and self.at is None:
            os.kill(os.getpid(), signal.SIGTERM)


def fit_on_two_ranks(strategy_cls, signal_rank=None, at=2):
    def body(rank):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": "2", "RANK": str(rank),
                       "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2"}  # fmt: skip
        watch = Watch(signal_rank, at)
        trainer = pl.Trainer(
            **QUIET, devices=2, strategy=strategy_cls(), max_epochs=1, limit_train_batches=6, limit_val_batches=0,
            callbacks=[watch],
        )  # fmt: skip
        stopped = None
        try:
            trainer.fit(BoringModel())
        except SIGTERMException:
            stopped = watch.batches
        finally:
            dist.broadcast = watch.original
        handlers_back = "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)
        assert trainer.received_sigterm == (stopped is not None or (at is None and rank == signal_rank))
        return watch.batches, watch.broadcasts, stopped, handlers_back

    return fork_ranks(2, body)


def test_silence_sigterm_broadcast_leaves_no_broadcast_per_batch():
    (batches, stock, _, _), _ = fit_on_two_ranks(DDPStrategy)
    assert batches == 6
    assert stock >= 6, "Lightning no longer broadcasts before every batch: drop silence_sigterm_broadcast"
    for batches, broadcasts, stopped, handlers_back in fit_on_two_ranks(SilentDDP):
        assert (batches, stopped, handlers_back) == (6, None, True)
        assert broadcasts <= stock - 6


@pytest.mark.parametrize("signal_rank", [0, 1])
def test_a_signal_on_any_rank_stops_all_after_the_same_batch(signal_rank):
    for batches, _, stopped, handlers_back in fit_on_two_ranks(SilentDDP, signal_rank):
        assert (batches, stopped, handlers_back) == (3, 3, True)


def test_a_signal_after_the_last_exchange_is_handed_over_to_lightning():
    for batches, _, stopped, handlers_back in fit_on_two_ranks(SilentDDP, signal_rank=1, at=None):
        assert (batches, stopped, handlers_back) == (6, None, True)


def test_request_stop_is_what_lightning_does_after_a_signal():
    class Stop(Callback):
        def __init__(self, how):
            self.how = how
            self.batches = 0

        def on_train_batch_end(self, trainer, *args):
            self.batches += 1
            if self.batches == 2:
                self.how(trainer)

    ends = []
    for how in [compat.request_stop, lambda _: os.kill(os.getpid(), signal.SIGTERM)]:
        stop = Stop(how)
        trainer = pl.Trainer(
            **QUIET, devices=1, max_epochs=2, limit_train_batches=5, limit_val_batches=0, callbacks=[stop]
        )
        with pytest.raises(SIGTERMException):
            trainer.fit(BoringModel())
        assert compat.received_sigterm(trainer)
        ends.append((stop.batches, trainer.global_step))
    assert ends == [(2, 2), (2, 2)]


def test_one_rank_and_other_stages_keep_lightnings_own_handling():
    trainer = pl.Trainer(**QUIET, devices=1)
    compat.silence_sigterm_broadcast(trainer)
    assert (
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor.__func__ is _TrainingEpochLoop._broadcast_sigterm_tensor
    )
    assert not compat.received_sigterm(trainer)
    compat.restore_sigterm_broadcast(trainer)


class Unseen(DataLoader):
    """Keeps its own argument under its name, so it can be made again although Lightning has not seen it made."""

    def __init__(self, dataset, colour, **kwargs):
        self.colour = colour
        super().__init__(dataset, **kwargs)


class Forgetful(DataLoader):
    def __init__(self, dataset, colour, **kwargs):
        super().__init__(dataset, **kwargs)


class OddBatchSampler(BatchSampler):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter([[i] for i in range(self.length)])

    def __len__(self):
        return self.length


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def numbers(n=12):
    return TensorDataset(torch.arange(n))


def read(loader):
    return [int(x) for (batch,) in loader for x in batch]


def test_with_sampler_keeps_everything_else():
    def collate(samples):
        return [torch.stack([s[0] for s in samples])]

    def init_worker(_):
        pass

    loader = Unseen(numbers(), "red", batch_size=5, shuffle=True, drop_last=True, collate_fn=collate)
    loader.worker_init_fn = init_worker
    made = compat.with_sampler(loader, [3, 1, 4, 1, 5, 9, 2])
    assert read(made) == [3, 1, 4, 1, 5]
    assert (type(made), made.colour, made.batch_size, made.drop_last) == (Unseen, "red", 5, True)
    assert made.collate_fn is collate
    assert made.worker_init_fn is init_worker
    batched = DataLoader(numbers(), batch_sampler=BatchSampler(RandomSampler(range(12)), 4, drop_last=False))
    assert [batch.tolist() for (batch,) in compat.with_sampler(batched, range(6))] == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        ([1, 2], "type list"),
        (DataLoader(Stream()), "Stream is an IterableDataset"),
        (Forgetful(numbers(), "red"), "Forgetful cannot be made again.*colour"),
        (DataLoader(numbers(), batch_sampler=OddBatchSampler(4)), "cannot be made again.*batch_size"),
    ],
)
def test_what_cannot_be_made_again_is_refused(loader, text):
    with pytest.raises(ValueError, match=f"(?s){text}"):
        compat.with_sampler(loader, range(3))


def test_accumulation_factor_is_what_lightning_divides_by():
    seen = []

    class Look(BoringModel):
        def training_step(self, batch, batch_idx):
            seen.append(compat.accumulation_factor(self.trainer))
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            divided.append(outputs["loss"].item())

        def loss(self, *args, **kwargs):
            return super().loss(*args, **kwargs) * 0 + 6.0

    divided = []
    trainer = pl.Trainer(
        **QUIET, devices=1, max_epochs=2, limit_train_batches=5, limit_val_batches=0,
        callbacks=[GradientAccumulationScheduler({0: 2, 1: 3})],
    )  # fmt: skip
    trainer.fit(Look(), DataLoader(RandomDataset(32, 8)))
    assert seen == [2] * 5 + [3] * 5
    assert divided == [3.0] * 5 + [2.0] * 5, "also in a last window of fewer micro-batches"


def test_publish_metrics_reaches_everybody_after_training(tmp_path):
    class Publish(Callback):
        def on_train_end(self, trainer, pl_module):
            compat.publish_metrics(trainer, {"comm/steps": 2.0**24 + 1})

    logger = CSVLogger(tmp_path)
    trainer = pl.Trainer(
        **QUIET | {"logger": logger}, devices=1, max_epochs=1, limit_train_batches=2, limit_val_batches=0,
        callbacks=[Publish()],
    )  # fmt: skip
    trainer.fit(BoringModel())
    assert trainer.callback_metrics["comm/steps"] == 2**24 + 1, "more than fp32 can count"
    assert trainer.logged_metrics["comm/steps"] == 2**24 + 1, "more than fp32 can count"
    header, row = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().split()
    assert dict(zip(header.split(","), row.split(",")))["comm/steps"] == "16777217.0"
