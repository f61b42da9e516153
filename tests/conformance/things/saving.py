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


@thing("resume in the middle of an epoch")
def resume_mid_epoch(case: Case) -> None:
    """Lightning starts the data over but not the batch count; N ranks must do what one process then does."""
    settings = {"max_epochs": 2, "accumulate_grad_batches": 2}
    weights = []
    for fit, name in ((case.one, "one"), (case.fit, "all")):
        keep = _keep(case, filename=f"{name}-{{step}}", every_n_train_steps=2)
        fit(Regression(), callbacks=[keep], enable_checkpointing=True, lossless=True, **settings)
        facts = fit(Regression(), ckpt_path=case.folder / f"{name}-step=2.ckpt", lossless=True, **settings)
        weights += [own.weights for own in (facts if isinstance(facts, list) else [facts])]
    for own in weights[1:]:
        same_weights(own, weights[0], 1e-10)


@thing("save weights only, load them into any strategy")
def weights_only(case: Case) -> None:
    keep = _keep(case, save_weights_only=True)
    facts = case.fit(Regression(), callbacks=[keep], enable_checkpointing=True)
    saved = torch.load(case.folder / "step=6.ckpt", weights_only=True)
    assert "lightning_distlab" not in saved
    same_weights(saved["state_dict"], facts[0].weights)
    (result,) = case.trainer().test(Regression(), loader(dataset(12)), ckpt_path=str(case.folder / "step=6.ckpt"),
                                    verbose=False)  # fmt: skip
    assert result["test_loss"] > 0


@thing("best checkpoint by a validation metric")
def best(case: Case) -> None:
    keep = ModelCheckpoint(case.folder, monitor="val_loss", filename="{epoch}", save_top_k=1)
    facts = case.fit(
        Regression(lr=0.01), val=loader(dataset(12)), callbacks=[keep], enable_checkpointing=True, max_epochs=3
    )
    (path,) = case.folder.glob("*.ckpt")
    saved = torch.load(path, weights_only=True)
    scores = next(value for name, value in saved["callbacks"].items() if name.startswith("ModelCheckpoint"))
    assert float(scores["best_model_score"]) <= facts[0].metrics["val_loss"] + 1e-12


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
