"""The all-reduce table of the lecture, from counted rounds, and the page of legal pairs."""

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_distlab.cli import app, numbers
from lightning_distlab.exchange.drivers import Link
from lightning_distlab.report.collective_table import ALGORITHMS, ELEMENTS, count
from lightning_distlab.report.pairs import pairs_page

M = 4 * ELEMENTS


def printed(algorithm, n):
    """(steps, peak of a node in a step, total, most that a worker sends), as docs/collectives.md prints them."""
    power = 1 << (n.bit_length() - 1)
    t, e = power.bit_length() - 1, n - power
    chunk = 4 * math.ceil(ELEMENTS / n)
    half = 4 * math.ceil(ELEMENTS / 2)
    if algorithm == "parameter_server":
        return 2, n * M, 2 * n * M, M
    if algorithm == "sequential":
        return n, (n - 1) * M, n * (n - 1) * M, (n - 1) * M
    if algorithm == "parallel":
        return 1, (n - 1) * M, n * (n - 1) * M, (n - 1) * M
    if algorithm == "ring":
        return 2 * (n - 1), chunk, 2 * (n - 1) * M, 2 * M - sum(sorted(ring_chunks(n))[:2])
    if algorithm == "butterfly":
        return t + 2 * (e > 0), M, power * t * M + 2 * e * M, (t + (e > 0)) * M
    if algorithm == "halving_doubling":
        return 2 * t + 2 * (e > 0), M if e else half, 2 * (power - 1) * M + 2 * e * M, None
    assert algorithm == "tree"
    levels = (n - 1).bit_length()
    return 2 * levels, M, 2 * (n - 1) * M, levels * M


def ring_chunks(n):
    return [4 * (ELEMENTS // n + (i < ELEMENTS % n)) for i in range(n)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_counted_equals_printed_for_every_number_of_workers(algorithm):
    for n in range(2, 65):
        row = count(algorithm, n)
        steps, peak, total, worker = printed(algorithm, n)
        assert (row.steps, row.peak_node_bytes_per_step, row.total_bytes) == (steps, peak, total), n
        if worker is not None:
            assert row.bytes_per_rank == worker, n


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32, 64])
def test_powers_of_two_are_the_lectures(n):
    rows = {name: count(name, n) for name in ALGORITHMS}
    lg = n.bit_length() - 1
    assert (rows["parameter_server"].peak_node_bytes_per_step, rows["parameter_server"].bytes_per_rank) == (n * M, M)
    assert (rows["sequential"].steps, rows["sequential"].total_bytes) == (n, n * (n - 1) * M)
    assert (rows["ring"].steps, rows["ring"].peak_node_bytes_per_step) == (2 * (n - 1), M // n)
    assert (rows["parallel"].steps, rows["parallel"].bytes_per_rank) == (1, (n - 1) * M)
    assert (rows["butterfly"].steps, rows["butterfly"].bytes_per_rank) == (lg, lg * M)
    halving = rows["halving_doubling"]
    assert (halving.steps, halving.bytes_per_rank) == (2 * lg, 2 * M * (n - 1) // n)


def test_time_follows_the_busiest_node_of_each_step():
    row = count("ring", 4)
    assert row.seconds(Link(1.0, math.inf), M) == 6
    assert row.seconds(Link(0.0, 1.0), M) == pytest.approx(6 * M / 4)
    assert row.seconds(Link(0.0, 1.0), 10 * M) == pytest.approx(60 * M / 4)


def test_command(tmp_path):
    result = CliRunner().invoke(
        app,
        ["collectives", "--workers", "2,3,8", "--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "a.png")],
    )
    assert result.exit_code == 0, result.output
    assert "takes in 73.1 GiB/s" in result.output
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == 3 * len(ALGORITHMS)
    assert set(rows[0]) == {
        "algorithm", "world_size", "steps", "peak_node_bytes_per_step", "total_bytes", "bytes_per_rank",
    }  # fmt: skip
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_lists_of_numbers():
    assert numbers("workers", "2,4-6,4", 2) == [2, 4, 5, 6]
    for bad in ("", "a", "1-3", "0", "5-3", "2,,3", "-2"):
        with pytest.raises(ValueError, match=f"workers='{bad}' must"):
            numbers("workers", bad, 2)


def test_page_of_pairs_is_current(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "pairs.md"
    assert page.read_text() == pairs_page(), "run: distlab pairs --page docs/pairs.md"
    result = CliRunner().invoke(app, ["pairs", "--page", str(tmp_path / "sub" / "pairs.md")])
    assert result.exit_code == 0
    assert (tmp_path / "sub" / "pairs.md").read_text() == pairs_page()
