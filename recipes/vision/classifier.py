"""Image classification as a LightningModule: cross-entropy, SGD or any optimizer, a learning rate per step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from recipes.schedules import check_schedule, lr_factor
from recipes.vision.in_memory import Batch
from recipes.vision.nets import build_net

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]


class ImageClassifier(pl.LightningModule):
    """Trains a network that maps images (B, C, H, W) to logits (B, num_classes).

    Hyper-parameters that reach the checkpoint are plain strings, numbers and lists, so that it loads with
    ``weights_only=True``. If ``net`` is a name, ``ImageClassifier.load_from_checkpoint(path)`` needs nothing else;
    if it is a module, pass it again.

    Args:
        net: Network, or its name (see ``build_net``).
        num_classes: Number of classes.
        lr: Learning rate after the warm-up.
        momentum: Momentum of SGD.
        weight_decay: Coefficient added to the gradient, times the weight.
        nesterov: Nesterov's form of the momentum.
        decay_norm_and_bias: Whether tensors of fewer than two dims (biases, BatchNorm) decay too. The CIFAR recipes of
            He et al. and of DGC decay everything; ImageNet recipes often decay matrices only.
        schedule: "constant", "cosine" (to 0 at the last step) or "step".
        milestones: Epochs at which lr is multiplied with ``gamma``, for "step".
        gamma: Factor at a milestone.
        warmup_epochs: Epochs of linear warm-up; parts of an epoch are allowed.
        warmup_steps: The same in optimizer steps.
        label_smoothing: Part of the target spread evenly over all classes, in training only.
        channels_last: Hands images to the network in channels-last memory format, 10-20 % faster in convolutions on
            CPU; parameters and gradients keep their usual layout.
        optimizer: Builds the optimizer from parameter groups, as ``functools.partial(torch.optim.AdamW, lr=1e-3)``
            does. Then ``momentum`` and ``nesterov`` are not used, and lr is the factory's own.

    Raises:
        ValueError: If an argument is out of range or two exclude each other.
    """

    def __init__(
        self,
        net: nn.Module | str,
        num_classes: int = 10,
        *,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        nesterov: bool = False,
        decay_norm_and_bias: bool = True,
        schedule: str = "cosine",
        milestones: Sequence[int] = (),
        gamma: float = 0.1,
        warmup_epochs: float = 0.0,
        warmup_steps: int = 0,
        label_smoothing: float = 0.0,
        channels_last: bool = True,
        optimizer: OptimizerFactory | None = None,
    ) -> None:
        super().__init__()
        check_schedule(schedule, milestones)
        _check_ranges(lr, momentum, weight_decay, nesterov, label_smoothing)
        if warmup_epochs < 0 or warmup_steps < 0 or (warmup_epochs and warmup_steps):
            raise ValueError(
                f"warmup_epochs={warmup_epochs} and warmup_steps={warmup_steps}: give one of them, not negative."
            )
        plain: dict[str, Any] = {"net": net} if isinstance(net, str) else {}
        plain |= {"num_classes": num_classes, "lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        plain |= {"nesterov": nesterov, "decay_norm_and_bias": decay_norm_and_bias, "schedule": schedule}
        plain |= {"milestones": [int(epoch) for epoch in milestones], "gamma": gamma, "warmup_epochs": warmup_epochs}
        plain |= {"warmup_steps": warmup_steps, "label_smoothing": label_smoothing, "channels_last": channels_last}
        self.save_hyperparameters(plain)
        self.net = build_net(net, num_classes) if isinstance(net, str) else net
        self._optimizer_factory = optimizer
        # validate_args checks every batch's values on the host, which the loss has checked already.
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro", validate_args=False)
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro", validate_args=False)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Maps images (B, C, H, W) to logits (B, num_classes)."""
        if self.hparams["channels_last"]:
            images = images.contiguous(memory_format=torch.channels_last)
        logits: Tensor = self.net(images)
        return logits

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels, label_smoothing=self.hparams["label_smoothing"])
        # The value of a step is this rank's own; only the mean of an epoch is averaged over ranks, once.
        self.log("train/loss_step", loss.detach(), on_step=True, on_epoch=False, prog_bar=True)
        self.log("train/loss", loss.detach(), on_step=False, on_epoch=True, sync_dist=True, batch_size=len(labels))
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "val", self.val_accuracy)

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "test", self.test_accuracy)

    @override
    def predict_step(self, batch: Batch | Tensor, batch_idx: int) -> Tensor:
        """Returns class probabilities (B, num_classes)."""
        images = batch if isinstance(batch, Tensor) else batch[0]
        probabilities: Tensor = self(images).softmax(dim=1)
        return probabilities

    def _evaluate(self, batch: Batch, stage: str, accuracy: MulticlassAccuracy) -> None:
        images, labels = batch
        logits = self(images)
        accuracy.update(logits, labels)
        loss = F.cross_entropy(logits, labels)
        self.log(f"{stage}/loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(labels))
        # A metric object adds up its counts over ranks when the epoch ends.
        self.log(f"{stage}/acc", accuracy, on_step=False, on_epoch=True, prog_bar=True)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self._build_optimizer()
        hp = self.hparams
        if hp["schedule"] == "constant" and not (hp["warmup_epochs"] or hp["warmup_steps"]):
            return optimizer
        total_steps = self.trainer.estimated_stepping_batches
        if hp["schedule"] == "cosine" and math.isinf(total_steps):
            raise ValueError("schedule='cosine' needs an end: set trainer.max_epochs or trainer.max_steps.")
        steps_per_epoch = self._steps_per_epoch() if hp["warmup_epochs"] or hp["milestones"] else 0
        warmup_steps = hp["warmup_steps"] or round(hp["warmup_epochs"] * steps_per_epoch)
        milestones = [epoch * steps_per_epoch for epoch in hp["milestones"]]

        def factor(step: int) -> float:
            return lr_factor(
                step,
                hp["schedule"],
                total_steps=total_steps,
                warmup_steps=warmup_steps,
                milestones=milestones,
                gamma=hp["gamma"],
            )

        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}

    def _steps_per_epoch(self) -> int:
        self.trainer.fit_loop.setup_data()  # does nothing if the data is loaded; with max_steps alone it is not yet
        batches = self.trainer.num_training_batches
        if math.isinf(batches):
            raise ValueError("warmup_epochs and milestones need training data of known length: use warmup_steps.")
        return math.ceil(batches / self.trainer.accumulate_grad_batches)

    def _build_optimizer(self) -> torch.optim.Optimizer:
        hp = self.hparams
        groups = parameter_groups(self.net, decay_norm_and_bias=hp["decay_norm_and_bias"])
        if self._optimizer_factory is not None:
            return self._optimizer_factory(groups)
        return torch.optim.SGD(
            groups,
            lr=hp["lr"],
            momentum=hp["momentum"],
            weight_decay=hp["weight_decay"],
            nesterov=hp["nesterov"],
        )


def parameter_groups(net: nn.Module, *, decay_norm_and_bias: bool) -> list[dict[str, Any]]:
    """Returns trainable parameters as one group, or as two of which the second, with ``dim < 2``, has no decay."""
    trainable = [p for p in net.parameters() if p.requires_grad]
    if decay_norm_and_bias:
        return [{"params": trainable}]
    matrices = [p for p in trainable if p.dim() >= 2]
    vectors = [p for p in trainable if p.dim() < 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def _check_ranges(lr: float, momentum: float, weight_decay: float, nesterov: bool, label_smoothing: float) -> None:
    if lr <= 0:
        raise ValueError(f"lr={lr} must be positive.")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum} is outside [0, 1).")
    if weight_decay < 0:
        raise ValueError(f"weight_decay={weight_decay} is negative: use 0 for none.")
    if nesterov and momentum == 0:
        raise ValueError("nesterov=True needs momentum > 0: set momentum=0.9 or nesterov=False.")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing={label_smoothing} is outside [0, 1).")
