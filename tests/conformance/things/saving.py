"""Checkpoints: written, resumed, taken to a stock Trainer and back."""

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.conformance.case import Case, same_weights
from tests.conformance.networks import Regression, dataset, loader
from tests.conformance.table import thing


def _keep(case: Case, **settings: object) -> ModelCheckpoint:
    return ModelCheckpoint(case.folder, **{"filename": "{step}", "save_top_k": -1, **settings})


@thing("save every n steps")
def save(case: Case) -> None:
    case.fit(Regression(), callbacks=[_keep(case, every_n_train_steps=2)], enable_checkpointing=True)
    assert {file.name for file in case.folder.glob("*.ckpt")} == {"step=2.ckpt", "step=4.ckpt", "step=6.ckpt"}
    saved = torch.load(case.folder / "step=4.ckpt", weights_only=True)
    assert saved["optimizer_states"][0]["param_groups"][0]["momentum"] == 0.9
    assert saved["global_step"] == 4


@thing("resume, bit for bit", aliases=True)
def resume(case: Case) -> None:
    straight = case.fit(Regression(), callbacks=[_keep(case)], max_epochs=2, enable_checkpointing=True)
    resumed = case.fit(Regression(lr=9.0), max_epochs=2, ckpt_path=case.folder / "step=6.ckpt")
    assert resumed[0].steps == straight[0].steps == 12
    for own, other in zip(resumed, straight, strict=True):
        same_weights(own.weights, other.weights)


@thing("evaluate a checkpoint")
def evaluate(case: Case) -> None:
    facts = case.fit(Regression(), callbacks=[_keep(case)], enable_checkpointing=True)
    data = loader(dataset(12))
    (result,) = case.trainer().validate(Regression(), data, ckpt_path=str(case.folder / "step=6.ckpt"), verbose=False)
    module = Regression()
    module.load_state_dict(facts[0].weights)
    assert abs(result["val_loss"] - float(module.loss(data.dataset.tensors))) < 1e-12


@thing("resume in a stock Trainer, momentum and decay intact")
def to_stock(case: Case) -> None:
    expected = case.one(Regression(), max_epochs=2)
    case.fit(Regression(), callbacks=[_keep(case)], enable_checkpointing=True, lossless=True)
    resumed = case.one(Regression(), max_epochs=2, ckpt_path=case.folder / "step=6.ckpt")
    assert resumed.groups == expected.groups
    same_weights(resumed.weights, expected.weights, 1e-10)


@thing("resume a stock checkpoint (`comm_state=reset`)")
def from_stock(case: Case) -> None:
    expected = case.one(Regression(), max_epochs=2)
    case.one(Regression(), callbacks=[_keep(case)], enable_checkpointing=True)
    path = case.folder / "step=6.ckpt"
    resumed = case.fit(Regression(), max_epochs=2, ckpt_path=path, lossless=True, options={"comm_state": "reset"})
    assert resumed[0].groups == expected.groups
    for own in resumed:
        same_weights(own.weights, expected.weights, 1e-10)
