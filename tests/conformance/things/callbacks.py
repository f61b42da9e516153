"""Callbacks that stop, average or unfreeze."""

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    StochasticWeightAveraging,
    WeightAveraging,
)

from tests.conformance.case import Case, same_weights
from tests.conformance.networks import Finetuned, Regression, dataset, loader
from tests.conformance.table import thing


@thing("`EarlyStopping`")
def early_stopping(case: Case) -> None:
    stop = EarlyStopping("val_loss", patience=1)
    facts = case.fit(Regression(lr=0.0), val=loader(dataset(12)), callbacks=[stop], max_epochs=9)
    assert [own.steps for own in facts] == [12] * len(facts)


@thing("EMA (`WeightAveraging`)")
def ema(case: Case) -> None:
    average = torch.optim.swa_utils.get_ema_avg_fn(0.8)
    case.parity(Regression(), callbacks=[WeightAveraging(avg_fn=average)])


@thing("`StochasticWeightAveraging`")
def swa(case: Case) -> None:
    case.parity(Regression(), callbacks=[StochasticWeightAveraging(0.05, swa_epoch_start=1)], max_epochs=3)


def _unfreezing() -> BackboneFinetuning:
    return BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.02, lambda_func=lambda epoch: 1.0)


@thing("`BackboneFinetuning`")
def finetuning(case: Case) -> None:
    expected = case.one(Finetuned(), callbacks=[_unfreezing()], max_epochs=3)
    facts = case.fit(Finetuned(), callbacks=[_unfreezing()], max_epochs=3, lossless=True)
    for own in facts:
        assert own.overlap == "after_backward"
        same_weights(own.weights, expected.weights, 1e-10)
    assert not torch.equal(facts[0].weights["backbone.weight"], Finetuned().state_dict()["backbone.weight"])


@thing("`BackboneFinetuning` with `overlap=bucket`: refused with the remedy")
def finetuning_bucket(case: Case) -> None:
    with pytest.raises(Exception, match="overlap='after_backward'"):
        case.fit(Finetuned(), callbacks=[_unfreezing()], max_epochs=3, lossless=True, options={"overlap": "bucket"})
