"""The cached list of trainable parameters follows whatever happens to the module."""

import pytest
from torch import nn

from lightning_distlab.strategies.trainable import Trainable, gradients_as_views


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def freeze(module: nn.Sequential) -> None:
    module[0].weight.requires_grad_(False)


def append(module: nn.Sequential) -> None:
    module.append(nn.Linear(3, 1))


def append_below(module: nn.Sequential) -> None:
    module[1].append(nn.Linear(3, 1))


def remove(module: nn.Sequential) -> None:
    del module[1]


def exchange_module(module: nn.Sequential) -> None:
    module[1][0] = nn.Linear(3, 3)


def exchange_parameter(module: nn.Sequential) -> None:
    module[0].weight = nn.Parameter(module[0].weight.detach().clone())


def tie(module: nn.Sequential) -> None:
    module[1].append(nn.Linear(3, 3))
    module[1][2].weight = module[1][0].weight


@pytest.mark.parametrize("change", [freeze, append, append_below, remove, exchange_module, exchange_parameter, tie])
def test_it_equals_a_walk_after_every_change(change):
    module = network()
    trainable = Trainable(module)
    before = trainable.named()
    change(module)
    expected = {name: p for name, p in module.named_parameters() if p.requires_grad}
    found = trainable.named()
    assert list(found) == list(expected)
    assert all(found[name] is expected[name] for name in expected)
    assert [id(p) for p in found.values()] != [id(p) for p in before.values()]


def test_nothing_is_walked_while_nothing_changes(monkeypatch):
    module = network()
    trainable = Trainable(module)
    first = trainable.named()
    monkeypatch.setattr(module, "named_parameters", lambda: pytest.fail("walked"))
    assert trainable.named() is first


def test_a_module_without_parameters_has_none():
    assert Trainable(nn.ReLU()).named() == {}


@pytest.mark.parametrize(
    ("network", "views"),
    [
        (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), True),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)), False),
        (nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ConvTranspose1d(3, 4, 3))), False),
    ],
)
def test_layout_of_gradients_by_kind_of_network(network, views):
    assert gradients_as_views(network) is views
