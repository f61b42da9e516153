"""Every cell of the capability table."""

import pytest

import tests.conformance.things  # noqa: F401  (registers the rows)
from tests.conformance.case import Case
from tests.conformance.columns import ALIASES, BASE
from tests.conformance.table import EXCEPTIONS, PAGE, THINGS, page


def _cells(columns, things):
    for name, row in things.items():
        marks = [pytest.mark.popen] if row.slow else []
        yield from (pytest.param(column, name, id=f"{name}-{column.name}", marks=marks) for column in columns)


@pytest.mark.parametrize(
    ("column", "name"),
    [*_cells(BASE, THINGS), *_cells(ALIASES, {name: row for name, row in THINGS.items() if row.aliases})],
)
def test_cell(column, name, tmp_path):
    refusal = EXCEPTIONS.get(name, {}).get(column.name)
    if refusal is None:
        THINGS[name].check(Case(column, tmp_path))
    else:
        with pytest.raises(Exception, match=refusal.pattern):
            THINGS[name].check(Case(column, tmp_path))


def test_exceptions_name_rows_and_columns():
    assert set(EXCEPTIONS) <= set(THINGS)
    assert {name for row in EXCEPTIONS.values() for name in row} <= {column.name for column in BASE}


def test_page_is_current():
    assert PAGE.read_text() == page(), "run: python -m tests.conformance.table"
