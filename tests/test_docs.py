"""What the documentation shows is run: its Python blocks as one program per page, its commands' files as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.app.compose import STRATEGIES, composed

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(?:<!-- file: (?P<file>\S+) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
WORD = re.compile(r"python train\.py((?: +[^\s`#]+)*)")


def blocks(page: Path, language: str) -> list[tuple[str | None, str]]:
    """(file name or None, code) of the blocks in a language."""
    found = FENCE.finditer(page.read_text())
    return [(m["file"], m["code"]) for m in found if m["language"] == language]


def run(program: Path, *words: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    done = subprocess.run(
        [sys.executable, str(program), *words],
        cwd=program.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-4000:]}"


def pages_with_code() -> list[Path]:
    return [page for page in PAGES if any(file is None for file, _ in blocks(page, "python"))]


@pytest.mark.popen
@pytest.mark.timeout(320)
@pytest.mark.parametrize("page", pages_with_code(), ids=lambda page: page.name)
def test_python_blocks_of_a_page_run_as_one_program(page, tmp_path):
    program = tmp_path / "page.py"
    program.write_text("\n".join(code for file, code in blocks(page, "python") if file is None))
    run(program)


@pytest.mark.popen
@pytest.mark.timeout(320)
def test_the_program_of_a_user_runs(tmp_path):
    named = [(file, code) for kind in ("python", "yaml") for file, code in blocks(ROOT / "README.md", kind) if file]
    assert {file for file, _ in named} == {"app.py", "conf/config.yaml"}
    for file, code in named:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(code)
    run(tmp_path / "app.py", "strategy=dgc_gather", "strategy.start_method=fork")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def commands() -> list[tuple[str, ...]]:
    """Every `python train.py` line of the documentation that is complete, as its words."""
    found = {tuple(words.split()) for page in PAGES for words in WORD.findall(page.read_text())}
    return sorted(words for words in found if not any(sign in word for word in words for sign in "<>…|;"))


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_compose(words):
    overrides = [word.strip("'\"") for word in words if "=" in word or word.startswith(("+", "~"))]
    local = [word for word in overrides if not word.startswith("strategy/compressor=random_k")]
    # A sweep lists its values with commas; each first one stands for all.
    with composed(*(re.sub(r"=([^\[\],]+),.*", r"=\1", word) for word in local)) as cfg:
        assert cfg.strategy._target_


def test_the_readme_lists_every_strategy():
    table = (ROOT / "README.md").read_text()
    missing = [name for name in STRATEGIES if f"`{name}`" not in table]
    assert not missing
