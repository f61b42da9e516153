"""Data sets of other kinds."""

import pytest

from tests.conformance.case import Case
from tests.conformance.networks import Endless, Regression, Silent, dataset, loader, united
from tests.conformance.table import thing


@thing("IterableDataset")
def iterable(case: Case) -> None:
    facts = case.fit(Regression(), loader(Endless(8)), lossless=True)
    assert [own.steps for own in facts] == [4] * len(facts)
    expected = case.one(Regression(), loader(Endless(16), batch=4))
    assert all((own.weights["net.0.weight"] - expected.weights["net.0.weight"]).abs().max() < 1e-10 for own in facts)


@thing("unequal IterableDatasets: the run ends, naming the rank that ended first")
def iterable_unequal(case: Case) -> None:
    if case.column.virtual:
        case.fit(Regression(), loader(Endless(8)))
    with pytest.raises(Exception, match=r"Rank 0 was lost[\s\S]*fewer batches"):
        case.fit(Silent(), loader(Endless((8, 12))))


@thing("unequal IterableDatasets stopped by `max_steps`")
def iterable_max_steps(case: Case) -> None:
    facts = case.fit(Regression(), loader(Endless((8, 10))), max_steps=4)
    assert [own.steps for own in facts] == [4] * len(facts)


@thing("data that ranks do not divide evenly")
def uneven(case: Case) -> None:
    data = dataset(21)
    expected = case.one(Regression(), united(case.column.ranks, data), max_epochs=2)
    for own in case.fit(Regression(), loader(data), max_epochs=2, lossless=True):
        assert own.steps == expected.steps == 12
        difference = (own.weights["net.0.weight"] - expected.weights["net.0.weight"]).abs().max()
        assert float(difference) == pytest.approx(0, abs=1e-10)


@thing("`limit_train_batches`")
def limited(case: Case) -> None:
    facts = case.parity(Regression(), limit_train_batches=3, max_epochs=2)
    assert facts[0].exchanges == 6
