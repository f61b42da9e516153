"""Fit, validate, test, predict, logging, precision."""

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from tests.conformance.case import Case
from tests.conformance.networks import Regression, Silent, dataset, loader
from tests.conformance.table import thing


@thing("fit equals one process on all batches", aliases=True)
def fit(case: Case) -> None:
    facts = case.parity(Regression())
    assert all(own.exchanges == own.steps == 6 for own in facts)
    assert facts[0].groups[0]["momentum"] == 0.9
    assert facts[0].groups[0]["weight_decay"] == 0.01


@thing("fit, Nesterov")
def nesterov(case: Case) -> None:
    case.parity(Regression(nesterov=True))


@thing("communication summary", aliases=True)
def summary(case: Case) -> None:
    trainer = case.trainer()
    strategy = trainer.strategy
    assert set(strategy.comm_summary()) >= {"comm/dense_bytes", "comm/payload_ratio", "comm/bytes_sent_per_rank"}
    (own, *_) = case.fit(Regression())
    assert own.exchanges == 6
    assert own.bytes_sent > 0


@thing("validate, with `sync_dist`")
def validate(case: Case) -> None:
    data = loader(dataset(12))
    (result,) = case.trainer().validate(Regression(), data, verbose=False)
    module = Regression()
    assert result["val_loss"] == pytest.approx(float(module.loss(data.dataset.tensors)), abs=1e-12)


@thing("test")
def test(case: Case) -> None:
    data = loader(dataset(12))
    (result,) = case.trainer().test(Regression(), data, verbose=False)
    assert result["test_loss"] == pytest.approx(float(Regression().loss(data.dataset.tensors)), abs=1e-12)


class _Predictions(Regression):
    def __init__(self, folder) -> None:
        super().__init__()
        self.folder = folder

    def predict_step(self, batch, batch_idx):
        torch.save(self.net(batch[0]), self.folder / f"p{self.global_rank}_{batch_idx}.pt")


@thing("predict")
def predict(case: Case) -> None:
    data = loader(dataset(12))
    case.trainer().predict(_Predictions(case.folder), data, return_predictions=False)
    rows = torch.cat([torch.load(file, weights_only=True) for file in case.folder.glob("p*.pt")])
    expected = Regression().net(data.dataset.tensors[0])
    assert rows.shape == expected.shape
    torch.testing.assert_close(rows.sum(0), expected.sum(0), rtol=0, atol=1e-12)


@thing("logging with `sync_dist` while training")
def logging(case: Case) -> None:
    module = Regression(lr=0.0)
    facts = case.fit(module)
    mean = float(module.loss(dataset().tensors))
    assert all(own.metrics["train_loss"] == pytest.approx(mean, abs=1e-6) for own in facts)


@thing("validation during fit")
def validation_in_fit(case: Case) -> None:
    facts = case.fit(Regression(), val=loader(dataset(12)), max_epochs=2, val_check_interval=3)
    module = Regression()
    module.load_state_dict(facts[0].weights)
    mean = float(module.loss(dataset(12).tensors))
    assert all(own.metrics["val_loss"] == pytest.approx(mean, abs=1e-6) for own in facts)


def _learns(case: Case, module: Regression, **settings: object) -> None:
    train = loader(dataset(dtype=torch.float32))
    facts = case.fit(module, train, max_epochs=3, **settings)
    assert facts[0].steps == facts[0].exchanges == 18
    for own in facts:
        assert all(torch.equal(value, own.weights[name]) for name, value in facts[0].weights.items()), "replicas differ"
        assert all(value.isfinite().all() for value in own.weights.values())
    trained = Regression(torch.float32)
    before = float(trained.loss(dataset(dtype=torch.float32).tensors))
    trained.load_state_dict({name: value.float() for name, value in facts[0].weights.items()})
    assert float(trained.loss(dataset(dtype=torch.float32).tensors)) < 0.9 * before


@thing("`bf16-mixed`")
def bf16_mixed(case: Case) -> None:
    _learns(case, Regression(torch.float32), precision="bf16-mixed")


@thing("`bf16-true`")
def bf16_true(case: Case) -> None:
    _learns(case, Regression(torch.float32), precision="bf16-true")


@thing("`16-mixed` with loss scaling")
def fp16_mixed(case: Case) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    _learns(case, Regression(torch.float32), plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)])


@thing("`fast_dev_run`")
def fast_dev_run(case: Case) -> None:
    facts = case.fit(Regression(), val=loader(dataset(12)), fast_dev_run=2)
    assert facts[0].steps == facts[0].exchanges == 2


@thing("`overfit_batches`")
def overfit_batches(case: Case) -> None:
    facts = case.fit(Regression(), overfit_batches=2, max_epochs=2)
    assert facts[0].steps == facts[0].exchanges == 4


@thing("barebones Trainer")
def barebones(case: Case) -> None:
    facts = case.fit(Silent(), barebones=True, logger=None, enable_checkpointing=None, enable_progress_bar=None,
                     enable_model_summary=None, num_sanity_val_steps=None)  # fmt: skip
    assert facts[0].steps == facts[0].exchanges == 6
