"""Import rules that the layer contracts cannot express."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lightning_distlab"
PURE = ("compression", "collectives", "payloads")


def imported(path: Path) -> set[str]:
    """Full names of what a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("folder", PURE)
def test_pure_parts_know_no_processes(folder):
    files = sorted((PACKAGE / folder).rglob("*.py"))
    assert files
    for path in files:
        assert not {name for name in imported(path) if name.startswith("torch.distributed")}, path


def test_lightning_is_imported_under_one_name():
    for path in sorted(PACKAGE.rglob("*.py")):
        assert not {name for name in imported(path) if name.split(".")[0] == "pytorch_lightning"}, path
