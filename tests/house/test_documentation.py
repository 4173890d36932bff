"""The documentation is true: its Python runs, its links and anchors exist, and the site has every page.

A fenced block of Python that is a whole script is run at toy size, in one process that is forked from one with torch
loaded. A script of another library is run as its users start it, where that library is installed. All other blocks must
parse. A script that needs smaller settings than STEPS says so after the word python, where a reader does not see it:

    ```python --set model.width=16
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import start
from tests.house.sources import ROOT, files
from unisono.environment import inherited

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
PEERS = ("accelerate", "lightning", "torchtune")
IMPORTS = re.compile(rf"^(?:from|import) ({'|'.join(PEERS)})\b", re.M)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)(?P<words>[^\n]*)\n(?P<code>.*?)^(?P=indent)```", re.M | re.S)
STEPS = ("--set", "steps=2", "--set", "epochs=none")


@dataclass(frozen=True)
class Block:
    """A fenced block of Python in a page; `line` is its first line."""

    page: Path
    line: int
    arguments: tuple[str, ...]
    code: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_ours(self) -> bool:
        return "unisono.main(" in self.code

    @property
    def launches(self) -> bool:
        return "unisono.launch(" in self.code

    @property
    def peer(self) -> str | None:
        """The other library that this script is written for."""
        found = IMPORTS.search(self.code)
        return found[1] if found and "__main__" in self.code and not self.is_ours else None

    @property
    def is_torchs(self) -> bool:
        return "init_process_group(" in self.code and "__main__" in self.code


def arguments_of(words: str) -> tuple[str, ...]:
    """Return the arguments of a script, without the title that a reader sees."""
    return tuple(word for word in words.split() if not word.startswith("title="))


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of Python in a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, m.start()) + 2, arguments_of(m["words"]), textwrap.dedent(m["code"]))
        for m in FENCE.finditer(text)
        if m["language"] == "python"
    ]


def is_translation(page: Path) -> bool:
    """Return whether a page is a translation. Its code is that of its original (test_translations), and runs there."""
    return page.name.endswith(".zh.md") or DOCS / "zh" in page.parents


BLOCKS = [block for page in PAGES if not is_translation(page) for block in blocks_of(page)]


def run(folder: Path, *command: str) -> None:
    """Run Python with these arguments in the folder; fail with its output."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=inherited({"PYTHONPATH": str(ROOT)}),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=100,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def by_name(block: Block) -> str:
    return block.name


# -- blocks of Python


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.is_ours], ids=by_name)
def test_our_scripts_run(block: Block, tmp_path: Path) -> None:
    for name in ("torchao", "torchtune"):
        if name in block.code and find_spec(name) is None:
            pytest.skip(f"needs {name}")
    (tmp_path / "run").mkdir()
    script = tmp_path / "script.py"
    script.write_text(block.code, encoding="utf-8")
    start(script, ["--run-dir=run", *STEPS, *block.arguments], ranks=1, logs=tmp_path)
    result = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    assert result["steps"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("block", [b for b in BLOCKS if b.launches], ids=by_name)
def test_blocks_that_launch_run(block: Block, tmp_path: Path) -> None:
    """Each block starts two runs in processes of their own."""
    (tmp_path / "script.py").write_text(block.code, encoding="utf-8")
    run(tmp_path, "script.py")


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.is_torchs], ids=by_name)
def test_scripts_for_torchrun_run(block: Block, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(block.code, encoding="utf-8")
    try:
        run(tmp_path, *TORCHRUN, "script.py")
    except AssertionError as error:  # torch's own processes sometimes abort at exit, which is not our defect
        if "terminate called without an active exception" not in str(error):
            raise
        run(tmp_path, *TORCHRUN, "script.py")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("block", [b for b in BLOCKS if b.peer], ids=by_name)
def test_scripts_of_peers_run(block: Block, ranks: int, tmp_path: Path) -> None:
    """Run the script on two processes, as it is written, and on one."""
    compile(block.code, block.name, "exec")
    assert block.peer is not None
    if find_spec(block.peer) is None:
        pytest.skip(f"{block.peer} is not installed here; make correctness runs this script where it is")
    code = block.code.replace("devices=2", f"devices={ranks}")  # Fabric starts its processes itself
    (tmp_path / "script.py").write_text(code, encoding="utf-8")
    run(tmp_path, *(TORCHRUN if ranks > 1 and block.peer == "accelerate" else ()), "script.py")


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if not (b.is_ours or b.launches or b.is_torchs or b.peer)], ids=by_name
)
def test_other_blocks_are_python(block: Block) -> None:
    """Other blocks parse, and the names that they import from the library exist."""
    for node in ast.walk(ast.parse(block.code, block.name)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "unisono":
            module = import_module(node.module or "")
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def test_blocks_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        '```python title="a"\na = 1\n```\n1. two\n   ```python --set b=2\n   if a:\n       b\n   ```\n```sh\nls\n```\n'
    )
    first, second = blocks_of(page)
    assert (first.line, first.arguments, first.code) == (2, (), "a = 1\n")
    assert (second.line, second.arguments, second.code) == (6, ("--set", "b=2"), "if a:\n    b\n")
    assert {block.page.name for block in BLOCKS} >= {"README.md", "from-ddp.md"}
    assert {block.peer for block in BLOCKS} == {None, *PEERS}


# -- links and anchors


def slug(heading: str) -> str:
    """Return the anchor of a heading: the id that it ends with, {#like-this}, or what Python-Markdown's toc makes."""
    if own := re.search(r"\{#([\w-]+)\}$", heading):
        return own[1]
    text = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.M)}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_inside_the_project_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?[^)]*\)", text):
        if "://" not in target:
            file = (page.parent / target) if target else page
            assert file.exists(), target
            assert not anchor or anchor in anchors_of(file), f"{target}#{anchor}"


def test_pages_that_the_library_names_exist() -> None:
    """Messages and docstrings name pages of docs/, some with an anchor."""
    named = {
        (path, target, anchor)
        for path in files("unisono", "tests", "benchmarks")
        for target, anchor in re.findall(r"(?<![\w./])(docs/[\w./-]+\.md)(?:#([\w-]+))?", path.read_text("utf-8"))
    }
    assert len(named) > 10
    for path, target, anchor in named:
        assert (ROOT / target).is_file(), f"{path}: {target}"
        assert not anchor or anchor in anchors_of(ROOT / target), f"{path}: {target}#{anchor}"


def test_files_that_the_pages_name_exist() -> None:
    """Pages name files of the project in backticks; a file that moves must move there, too."""
    named = {
        (page, name)
        for page in PAGES
        for name in re.findall(r"`((?:unisono|tests|benchmarks|tools)/[\w./-]+)`", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert [(str(page), name) for page, name in sorted(named) if not (ROOT / name).exists()] == []


# -- the site


def pages_in(navigation: Any) -> Iterator[str]:
    """Yield the pages of the navigation of zensical.toml, which nests lists and tables."""
    if isinstance(navigation, str):
        yield navigation
    else:
        for entry in navigation.values() if isinstance(navigation, dict) else navigation:
            yield from pages_in(entry)


def test_the_site_has_every_page_once() -> None:
    settings = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))
    pages = list(pages_in(settings["project"]["nav"]))
    assert sorted(pages) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_every_package_has_a_page() -> None:
    packages = {path.parent.name for path in (ROOT / "unisono").glob("*/__init__.py")}
    pages = {page.stem for page in (DOCS / "design" / "packages").glob("*.md")}
    assert pages == packages | {"index", "top-level"}
