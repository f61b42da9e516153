import math

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from lightning_distlab.strategies import precision as ours
from tests.helpers.fork import fork_ranks


def one_step(plugin, value, algorithm="norm"):
    """Weights after one clipped step of SGD in a Trainer."""
    torch.manual_seed(0)
    model = BoringModel()
    batch = torch.randn(2, 32, generator=torch.Generator().manual_seed(1)) * 10
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, max_steps=1, limit_val_batches=0, gradient_clip_val=value,
        gradient_clip_algorithm=algorithm, plugins=[plugin],
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(list(batch), batch_size=2))
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize(
    "stock", [Precision(), DoublePrecision(), HalfPrecision("bf16-true"), MixedPrecision("bf16-mixed", "cpu")]
)
def test_the_trainer_clips_through_our_twin_as_through_the_stock_plugin(stock, algorithm, monkeypatch):
    calls = []
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        real = getattr(ours, name)
        monkeypatch.setattr(ours, name, lambda *a, _f=real, _n=name, **k: (calls.append(_n), _f(*a, **k))[1])
    twin = ours.mesh_precision(stock)
    assert isinstance(twin, type(stock))
    assert twin.precision == stock.precision
    clipped = one_step(twin, 0.01, algorithm)
    assert calls == [f"clip_grad_{algorithm}_"]
    torch.testing.assert_close(clipped, one_step(stock, 0.01, algorithm), rtol=1e-6, atol=1e-8)
    assert not torch.equal(clipped, one_step(stock, 1e6, algorithm)), "the bound was active"


def test_a_twin_stays_and_a_scaler_moves_along():
    twin = ours.MeshPrecision()
    assert ours.mesh_precision(twin) is twin
    scaler = torch.amp.GradScaler("cpu")
    mixed = ours.mesh_precision(MixedPrecision("16-mixed", "cpu", scaler))
    assert mixed.scaler is scaler
    assert mixed.precision == "16-mixed"


def test_a_foreign_plugin_is_refused():
    class Own(Precision):
        pass

    with pytest.raises(ValueError, match=r"Own cannot be clipped across mesh axes.*MeshClipping"):
        ours.mesh_precision(Own())


def test_groups_and_owners_reach_the_norm():
    """Two stages with gradients 3 and 4, and a tied 12 on both: norm 13."""

    def body(rank):
        plugin = ours.MeshPrecision()
        own, tied = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        own.grad, tied.grad = torch.tensor([3.0 + rank]), torch.tensor([12.0])
        plugin.reduce_over = [dist.group.WORLD]
        plugin.counted = lambda p: rank == 0 or p is not tied
        plugin.clip_gradients(torch.optim.SGD([own, tied], lr=1.0), 1.0)
        return own.grad.item(), tied.grad.item()

    for rank, (own, tied) in enumerate(fork_ranks(2, body)):
        assert math.isclose(own, (3 + rank) / 13, rel_tol=1e-6)
        assert math.isclose(tied, 12 / 13, rel_tol=1e-6)
