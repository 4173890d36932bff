"""Source files of the project, as the tests of this folder read them."""

from __future__ import annotations

import ast
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "unisono"


def files(*folders: str) -> list[Path]:
    """Return all Python files below these folders of the project, sorted; a missing folder is an error."""
    found = []
    for folder in folders:
        assert (ROOT / folder).is_dir(), folder
        found += [path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts]
    return sorted(found)


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def place(path: Path, node: ast.AST) -> str:
    """Return file:line, as editors read it."""
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def code_lines(path: Path) -> int:
    """Count the lines that hold code: no blank lines, no comments, no docstrings, no strings that stand alone."""
    prose = {
        line
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    with path.open("rb") as file:
        skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
        skipped |= {tokenize.ENCODING, tokenize.ENDMARKER}
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in skipped]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - prose)
