"""The project's own files, as the tests of this folder read them."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "unisono"


def files(*folders: str) -> list[Path]:
    """All Python files below these folders of the project, sorted; a folder that is not there is a mistake."""
    found = []
    for folder in folders:
        assert (ROOT / folder).is_dir(), folder
        found += [path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts]
    return sorted(found)


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def place(path: Path, node: ast.AST) -> str:
    """file:line, as an editor wants it."""
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
