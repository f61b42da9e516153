import functools
import json
import math

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from recipes.vision.classifier import ImageClassifier, parameter_groups
from recipes.vision.digits import DigitsDataModule
from recipes.vision.in_memory import image_loader
from recipes.vision.nets import build_net


def quiet_trainer(tmp_path, **options):
    defaults = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
    defaults |= {"enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": tmp_path}
    return pl.Trainer(**(defaults | options))


def test_digits_split_is_fixed_stratified_and_complete():
    module = DigitsDataModule()
    module.setup("fit")
    parts = {name: module._splits[name] for name in ("train", "val", "test")}
    assert {name: len(part) for name, part in parts.items()} == {"train": 1257, "val": 180, "test": 360}
    assert torch.cat([part.subset for part in parts.values()]).sort().values.tolist() == list(range(1797))
    share = torch.bincount(module._splits["test"].labels) / 1797
    for part in parts.values():
        counts = torch.bincount(part.labels[part.subset], minlength=10)
        assert (counts - share * len(part)).abs().max() < 2
    torch.manual_seed(123)
    again = DigitsDataModule()
    again.setup("test")
    assert torch.equal(again._splits["test"].subset, parts["test"].subset)


def test_digits_training_pixels_are_normalised():
    module = DigitsDataModule(batch_size=1257)
    module.setup("fit")
    images, _ = next(iter(module.train_dataloader()))
    assert images.shape == (1257, 1, 8, 8)
    assert images.mean().item() == pytest.approx(0, abs=1e-5)
    assert images.std().item() == pytest.approx(1, abs=1e-5)


def test_digits_sizes_are_checked():
    with pytest.raises(ValueError, match="val_size=1000 and test_size=797"):
        DigitsDataModule(val_size=1000, test_size=797)


def test_learns_digits(tmp_path):
    pl.seed_everything(0)
    model, data = ImageClassifier("digits_mlp", lr=0.05), DigitsDataModule()
    trainer = quiet_trainer(tmp_path, max_epochs=5)
    trainer.fit(model, data)
    assert {"train/loss", "train/loss_step", "val/loss", "val/acc"} <= set(trainer.callback_metrics)
    assert trainer.test(model, data, verbose=False)[0]["test/acc"] > 0.93
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)


def test_validation_numbers_are_those_of_the_whole_set(tmp_path):
    model, data = ImageClassifier("digits_convnet"), DigitsDataModule(batch_size=50)  # batches of 50, 50, 50, 30
    result = quiet_trainer(tmp_path).validate(model, data, verbose=False)[0]
    images, labels = data._splits["val"].__getitems__(range(180))
    with torch.no_grad():
        logits = model(images)
    assert result["val/acc"] == pytest.approx((logits.argmax(1) == labels).float().mean().item(), abs=1e-6)
    assert result["val/loss"] == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)


class CountingStrategy(SingleDeviceStrategy):
    reductions = 0

    def reduce(self, tensor, *args, **kwargs):
        self.reductions += 1
        return tensor


def test_logging_reduces_once_an_epoch_not_once_a_batch(tmp_path):
    counts = []
    for batches in (2, 20):
        strategy = CountingStrategy("cpu")
        model = ImageClassifier("digits_mlp", schedule="constant")
        trainer = quiet_trainer(tmp_path, max_epochs=1, limit_train_batches=batches, strategy=strategy)
        trainer.fit(model, DigitsDataModule())
        counts.append(strategy.reductions)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("form", ["scalars", "partial"])
def test_resume_with_stock_settings_continues_exactly(tmp_path, form):
    """Lightning loads with weights_only=True unless told otherwise; the hyper-parameters must survive that."""
    factory = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9) if form == "partial" else None

    def new_model():
        pl.seed_everything(1)
        return ImageClassifier("digits_mlp", optimizer=factory, schedule="step", milestones=[1], warmup_steps=3)

    data = DigitsDataModule()
    data.setup("fit")
    in_order = image_loader(data._splits["train"], batch_size=100, num_workers=0, train=False)  # 13 batches
    whole = new_model()
    quiet_trainer(tmp_path, max_epochs=2).fit(whole, in_order)

    class SaveEnd(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "half.ckpt")

    half = new_model()
    quiet_trainer(tmp_path, max_epochs=1, callbacks=[SaveEnd()]).fit(half, in_order)
    resumed = new_model()
    trainer = quiet_trainer(tmp_path, max_epochs=2)
    trainer.fit(resumed, in_order, ckpt_path=tmp_path / "half.ckpt")
    assert trainer.global_step == 26
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value)
    loaded = ImageClassifier.load_from_checkpoint(tmp_path / "half.ckpt", weights_only=True)
    for name, value in half.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_hyper_parameters_are_plain(tmp_path):
    model = ImageClassifier(build_net("digits_mlp"), optimizer=functools.partial(torch.optim.AdamW, lr=1e-3))
    assert json.loads(json.dumps(dict(model.hparams))) == dict(model.hparams)
    assert "net" not in model.hparams
    assert "optimizer" not in model.hparams
    assert ImageClassifier("digits_mlp").hparams["net"] == "digits_mlp"


def test_learning_rates_of_the_papers_recipe(tmp_path):
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            seen.append(trainer.optimizers[0].param_groups[0]["lr"])

    model = ImageClassifier("digits_mlp", lr=0.1, schedule="step", milestones=[2, 3], warmup_epochs=1)
    trainer = quiet_trainer(tmp_path, max_epochs=4, limit_train_batches=5, limit_val_batches=0, callbacks=[Watch()])
    trainer.fit(model, DigitsDataModule())
    expected = [0.02, 0.04, 0.06, 0.08, 0.1] + [0.1] * 5 + [0.01] * 5 + [0.001] * 5
    assert seen == pytest.approx(expected)


def test_cosine_counts_optimizer_steps_under_accumulation(tmp_path):
    model = ImageClassifier("digits_mlp", lr=0.1)
    trainer = quiet_trainer(
        tmp_path, max_epochs=2, limit_train_batches=6, limit_val_batches=0, accumulate_grad_batches=3
    )
    trainer.fit(model, DigitsDataModule())
    assert trainer.global_step == 4
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("warmup", "third"),
    [({}, 0.5 + 0.5 * math.cos(0.1 * math.pi)), ({"warmup_epochs": 1}, 0.3), ({"warmup_steps": 5}, 0.6)],
)
def test_a_run_bounded_by_steps_alone(tmp_path, warmup, third):
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            seen.append(trainer.optimizers[0].param_groups[0]["lr"])

    model = ImageClassifier("digits_mlp", lr=1.0, schedule="cosine", **warmup)
    trainer = quiet_trainer(tmp_path, max_steps=20, limit_train_batches=10, limit_val_batches=0, callbacks=[Watch()])
    trainer.fit(model, DigitsDataModule())
    assert len(seen) == 20
    assert seen[2] == pytest.approx(third)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)


def test_cosine_without_an_end_is_refused(tmp_path):
    trainer = quiet_trainer(tmp_path, max_epochs=-1, limit_train_batches=2)
    with pytest.raises(ValueError, match="needs an end"):
        trainer.fit(ImageClassifier("digits_mlp"), DigitsDataModule())


def test_decay_reaches_the_tensors_asked_for():
    net = build_net("resnet8")
    (everything,) = parameter_groups(net, decay_norm_and_bias=True)
    assert len(everything["params"]) == len(list(net.parameters()))
    matrices, vectors = parameter_groups(net, decay_norm_and_bias=False)
    assert vectors["weight_decay"] == 0.0
    assert {p.dim() for p in matrices["params"]} == {2, 4}
    assert {p.dim() for p in vectors["params"]} == {1}
    assert len(matrices["params"]) + len(vectors["params"]) == len(everything["params"])
    net.fc.bias.requires_grad_(False)
    assert all(p is not net.fc.bias for p in parameter_groups(net, decay_norm_and_bias=True)[0]["params"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr=0.0"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"momentum": 0.0, "nesterov": True}, "nesterov"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"warmup_epochs": 1, "warmup_steps": 5}, "give one"),
        ({"schedule": "linear"}, "schedule='linear'"),
    ],
)
def test_bad_hyper_parameters(options, message):
    with pytest.raises(ValueError, match=message):
        ImageClassifier("digits_mlp", **options)


def test_predicts_probabilities(tmp_path):
    model, data = ImageClassifier("digits_mlp"), DigitsDataModule()
    data.setup("predict")
    (first, *_) = quiet_trainer(tmp_path).predict(model, data.test_dataloader())
    torch.testing.assert_close(first.sum(1), torch.ones(16))


def test_two_ranks_report_the_numbers_of_one(tmp_path):
    pl.seed_everything(3)
    model, data = ImageClassifier("digits_convnet"), DigitsDataModule(batch_size=50)
    alone = quiet_trainer(tmp_path).test(model, data, verbose=False)[0]
    ranks = quiet_trainer(tmp_path, strategy="ddp_fork", devices=2).test(model, data, verbose=False)[0]
    assert ranks["test/acc"] == pytest.approx(alone["test/acc"], abs=1e-6)
    assert ranks["test/loss"] == pytest.approx(alone["test/loss"], rel=1e-5)
