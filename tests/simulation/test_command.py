import json

import pytest
from typer.testing import CliRunner

from lightning_distlab.cli import app
from lightning_distlab.strategies import NAMES

pytest.importorskip("torchvision")


def run(*words):
    return CliRunner().invoke(app, ["simulate", *words])


def test_rows_and_plot(tmp_path):
    result = run(
        "--strategies", "ddp,dgc_gather,dgc_hierarchical,fedavg,dga", "--ranks", "1-4", "--links", "globe",
        "--links", "20ms,100mbit", "--compute", "0.3", "--json", str(tmp_path / "rows.json"),
        "--plot", str(tmp_path / "plot.png"), "--steps", "50",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert set(rows[0]) == {"strategy", "ranks", "link", "compute_s", "step_s", "efficiency", "speedup"}
    found = {(row["strategy"], row["ranks"], row["link"]): row for row in rows}
    assert ("dgc_hierarchical", 3, "globe") not in found
    assert len(rows) == 2 * (5 * 4 - 2)
    for (_, ranks, _), row in found.items():
        assert row["efficiency"] == pytest.approx(0.3 / row["step_s"])
        assert row["speedup"] == pytest.approx(ranks * row["efficiency"])
    globe = {name: found[name, 4, "globe"]["step_s"] for name in ("ddp", "dgc_gather", "fedavg", "dga")}
    assert globe["dgc_gather"] < globe["dga"] <= globe["fedavg"] < globe["ddp"]  # 100 MB are too much for the link
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_every_registered_strategy_can_be_simulated(tmp_path):
    names = ",".join(NAMES)
    result = run("--strategies", names, "--ranks", "8", "--links", "datacenter", "--json", str(tmp_path / "rows.json"))
    assert result.exit_code == 0, result.output
    assert len(json.loads((tmp_path / "rows.json").read_text())) == len(NAMES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--strategies", "hogwild"), "strategies='hogwild' must be one of ddp"),
        (("--links", "moon"), "link='moon' must be one of rack"),
        (("--model", "lenet"), "model='lenet' must be one of"),
        (("--ranks", "0"), "ranks='0' must"),
    ],
)
def test_bad_words_are_refused(words, message):
    result = run(*words)
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
