import json
import sys

import pytest

from lightning_distlab import cli
from tests.report.folders import write_run


def _distlab(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["distlab", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, capsys.readouterr()


@pytest.fixture
def runs(tmp_path):
    for seed, acc in enumerate((0.90, 0.94)):
        write_run(tmp_path / "runs" / f"dgc{seed}", "dgc_ring", seed, acc)
        write_run(tmp_path / "runs" / f"ddp{seed}", "ddp", seed, acc + 0.01, sent=50 * 2.0**20)
    return tmp_path / "runs"


def test_compare_tabulates_by_strategy(runs, monkeypatch, capsys):
    code, output = _distlab(monkeypatch, capsys, "compare", runs)
    assert code == 0
    line = next(line for line in output.out.splitlines() if "dgc_ring" in line)
    assert "0.9200 ± 0.0283" in line
    assert "0.9300 ± 0.0283" in line
    assert "10.5 ± 0.7" in line


def test_compare_writes_json_and_a_picture(runs, tmp_path, monkeypatch, capsys):
    json_file, picture = tmp_path / "new" / "a.json", tmp_path / "new" / "a.png"
    code, _ = _distlab(monkeypatch, capsys, "compare", runs, "--json", json_file, "--plot", picture)
    assert code == 0
    ddp, dgc = json.loads(json_file.read_text())
    assert (ddp["strategy"], dgc["strategy"], dgc["n"]) == ("ddp", "dgc_ring", 2)
    assert dgc["last"]["val/acc"]["mean"] == pytest.approx(0.92)
    assert dgc["comm/payload_ratio"]["mean"] == 50.0
    assert [run["seed"] for run in dgc["runs"]] == [0, 1]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--metric", "val/f1"], "no run has the metric 'val/f1'; there are val/acc"),
        (["missing"], "missing is no folder"),
    ],
)
def test_mistakes_are_one_line(arguments, message, runs, monkeypatch, capsys):
    code, output = _distlab(monkeypatch, capsys, "compare", runs, *arguments)
    assert code == 2
    assert output.err.startswith("error: ")
    assert message in output.err
    assert output.err.count("\n") == 1


def test_nothing_to_draw_is_said(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "a", "lightning_ddp", 0, 0.9, sent=None)
    code, output = _distlab(monkeypatch, capsys, "compare", tmp_path, "--plot", tmp_path / "a.png")
    assert code == 2
    assert "nothing to draw" in output.err
