"""Write a table of modules for each package of the library, from the first sentence of their docstrings.

    python -m tools.module_tables build/reference/packages

docs/design/packages/ includes these files. Nothing is imported: the sources are parsed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

LIBRARY = Path(__file__).resolve().parents[1] / "unisono"


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[.?:])\s(?=[A-Z])", paragraph)[0].rstrip(".:").replace("|", r"\|")


def rows(folder: Path) -> Iterator[str]:
    """Yield a row of the table for each module of a folder, and for those of its sub-folders."""
    for path in sorted(folder.glob("*.py")):
        yield f"| `{path.relative_to(LIBRARY)}` | {first_sentence(path)} |"
    for inner in sorted(path for path in folder.iterdir() if (path / "__init__.py").exists()):
        yield from rows(inner)


def table(lines: Iterator[str]) -> str:
    """Return a table of modules in Markdown."""
    return "\n".join(["| Module | What it has |", "|---|---|", *lines, ""])


def main() -> None:
    """Write one file for each package, and top-level.md, to the folder that the command line names."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    packages = [path for path in LIBRARY.iterdir() if (path / "__init__.py").exists()]
    for package in packages:
        (folder / f"{package.name}.md").write_text(table(rows(package)), encoding="utf-8")
    own = (f"| `{path.name}` | {first_sentence(path)} |" for path in sorted(LIBRARY.glob("*.py")))
    (folder / "top-level.md").write_text(table(own), encoding="utf-8")


if __name__ == "__main__":
    main()
