import math

import torch

from lightning_distlab.app.metrics import MetricHistory


def test_last_and_best_in_the_direction_of_each_metric():
    history = MetricHistory()
    for acc, loss in ((0.5, 2.0), (0.9, 1.0), (0.7, 3.0)):
        history.update({"val/acc": torch.tensor(acc, dtype=torch.float64), "val/loss": loss})
    assert history.last == {"val/acc": 0.7, "val/loss": 3.0}
    assert history.best == {"val/acc": 0.9, "val/loss": 1.0}


def test_nan_is_last_but_never_best():
    history = MetricHistory()
    history.update({"val/loss": float("nan")})
    assert history.best == {}
    history.update({"val/loss": 2.0})
    history.update({"val/loss": float("nan")})
    assert math.isnan(history.last["val/loss"])
    assert history.best == {"val/loss": 2.0}
