"""Accumulation, clipping, schedules, several optimizers."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

from tests.conformance.case import Case
from tests.conformance.networks import Adversarial, OneCycle, Regression
from tests.conformance.table import thing


@thing("`accumulate_grad_batches`: one exchange per optimizer step")
def accumulate(case: Case) -> None:
    facts = case.parity(Regression(), accumulate_grad_batches=4)
    assert [own.exchanges for own in facts] == [2] * len(facts), "4 batches, then the 2 that are left"


@thing("`GradientAccumulationScheduler`")
def accumulation_scheduler(case: Case) -> None:
    facts = case.parity(Regression(), callbacks=[GradientAccumulationScheduler({0: 1, 1: 3})], max_epochs=2)
    assert facts[0].steps == facts[0].exchanges == 6 + 2


@thing("`gradient_clip_val`")
def clip(case: Case) -> None:
    case.parity(Regression(), gradient_clip_val=0.3)


@thing("`OneCycleLR` with momentum cycling")
def one_cycle(case: Case) -> None:
    facts = case.parity(OneCycle(), max_steps=8, max_epochs=2)
    assert facts[0].groups[0]["momentum"] != 0.9


class _Watch(Callback):
    """Notes what a user's callback sees of the optimizer around a step."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.noted = {"momentum": trainer.optimizers[0].param_groups[0]["momentum"]}


@thing("`LearningRateMonitor(log_momentum=True)` shows the user's")
def rate_monitor(case: Case) -> None:
    logger = CSVLogger(case.folder, name="", version="")
    monitor = LearningRateMonitor(logging_interval="step", log_momentum=True, log_weight_decay=True)
    facts = case.fit(OneCycle(), callbacks=[monitor, _Watch()], logger=logger, log_every_n_steps=1, max_steps=6)
    lines = (case.folder / "metrics.csv").read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    column = next(name for name in rows[0] if "momentum" in name)
    seen = [float(row[column]) for row in rows if row[column]]
    assert seen[0] == pytest.approx(0.95)
    assert min(seen) >= 0.85
    assert min(seen) < 0.94
    assert 0.85 <= facts[0].noted["momentum"] <= 0.95
    decay = next(name for name in rows[0] if "decay" in name)
    assert float(rows[0][decay]) == 0.01


@thing("manual optimization with two optimizers")
def manual(case: Case) -> None:
    facts = case.parity(Adversarial())
    assert facts[0].exchanges == facts[0].steps == 12


class _Accumulated(Adversarial):
    """Steps both optimizers in every third batch only."""

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        x, y = batch
        self.manual_backward((self.net(x) - y).square().mean() / 3 + self.critic(y).square().mean() / 3)
        if batch_idx % 3 == 2:
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()


@thing("manual optimization with accumulation")
def manual_accumulation(case: Case) -> None:
    facts = case.parity(_Accumulated())
    assert facts[0].exchanges == facts[0].steps == 4


@thing("`overlap=bucket` with accumulation")
def bucket_accumulation(case: Case) -> None:
    options = {"overlap": "bucket", "bucket_cap_mb": 1e-3}
    facts = case.parity(Regression(), options=options, accumulate_grad_batches=3)
    assert facts[0].overlap == "bucket"
    assert facts[0].exchanges == 2


@thing("`overlap=after_backward` with accumulation")
def named_accumulation(case: Case) -> None:
    options = {"overlap": "after_backward", "bucket_cap_mb": 1e-3}
    facts = case.parity(Regression(), options=options, accumulate_grad_batches=3)
    assert facts[0].overlap == "after_backward"
    assert facts[0].exchanges == 2


@thing("gradient hooks see averages")
def hooks(case: Case) -> None:
    expected = case.one(_Hooked())
    for own in case.fit(_Hooked(), lossless=True):
        assert own.noted["norm"] == pytest.approx(expected.noted["norm"], abs=1e-10)


class _Hooked(Regression):
    """Notes the norm of what the optimizer gets."""

    def __init__(self):
        super().__init__(momentum=0.0, weight_decay=0.0)

    def on_before_optimizer_step(self, optimizer):
        self.noted = {"norm": float(torch.stack([p.grad.norm() for p in self.parameters()]).norm())}


class _Adam(Regression):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@thing("AdamW")
def adam(case: Case) -> None:
    case.parity(_Adam(), tolerance=1e-9)


class _Plateau(Regression):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "train_loss"}}


@thing("`ReduceLROnPlateau`")
def plateau(case: Case) -> None:
    facts = case.fit(_Plateau(), max_epochs=3)
    assert {own.groups[0]["lr"] for own in facts} == {facts[0].groups[0]["lr"]}
    assert facts[0].groups[0]["lr"] < 0.05
