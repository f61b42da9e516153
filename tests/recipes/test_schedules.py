import math

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR

from recipes.schedules import check_schedule, lr_factor


def test_cosine_equals_torchs_closed_form():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = CosineAnnealingLR(optimizer, T_max=50)
    for step in range(51):
        assert lr_factor(step, "cosine", total_steps=50) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()


def test_step_equals_torchs_multistep():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = MultiStepLR(optimizer, milestones=[3, 7], gamma=0.1)
    for step in range(10):
        ours = lr_factor(step, "step", total_steps=10, milestones=[3, 7])
        assert ours == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("schedule", ["constant", "cosine", "step"])
def test_warmup_rises_linearly_to_one_and_joins_without_a_jump(schedule):
    factors = [lr_factor(t, schedule, total_steps=100, warmup_steps=5, milestones=[50]) for t in range(6)]
    assert factors == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_cosine_ends_at_zero_and_stays():
    assert lr_factor(40, "cosine", total_steps=40, warmup_steps=10) == pytest.approx(0.0, abs=1e-15)
    assert lr_factor(60, "cosine", total_steps=40, warmup_steps=10) == pytest.approx(0.0, abs=1e-15)
    assert lr_factor(25, "cosine", total_steps=40, warmup_steps=10) == pytest.approx(0.5)
    assert lr_factor(5, "cosine", total_steps=math.inf, warmup_steps=10) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("name", "milestones", "message"),
    [
        ("cosin", [], "did you mean 'cosine'"),
        ("step", [], "needs milestones"),
        ("cosine", [3], "mean nothing"),
        ("step", [5, 5], "increasing"),
        ("step", [0, 5], "positive"),
    ],
)
def test_bad_schedules_are_refused(name, milestones, message):
    with pytest.raises(ValueError, match=message):
        check_schedule(name, milestones)
