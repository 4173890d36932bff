"""What the papers show runs: every block of Python in README.md, CONTRIBUTING.md and docs/, however deep.

A block that is a whole script is run, at toy size and in one process (forked from one that has loaded torch); one of
another library's is run as its users start it, where that is installed. Anything else must at least be Python. A script
that needs smaller settings than STEPS says so behind the word python, where a reader does not see it:

    ```python --set model.width=16
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli.command import start
from tests.house.sources import ROOT
from unisono.environment import inherited

PAPERS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PEERS = ("accelerate", "lightning")
IMPORTS = re.compile(rf"^(?:from|import) ({'|'.join(PEERS)})\b", re.M)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
FENCE = re.compile(r"^(?P<indent> *)```python(?P<words>[^\n]*)\n(?P<code>.*?)^(?P=indent)```", re.M | re.S)
STEPS = ("--set", "steps=2", "--set", "epochs=none")


@dataclass(frozen=True)
class Block:
    """A fenced block of Python in a paper; `line` is where it begins."""

    paper: Path
    line: int
    words: tuple[str, ...]
    code: str

    @property
    def name(self) -> str:
        return f"{self.paper.relative_to(ROOT)}:{self.line}"

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
        return found[1] if found and "__main__" in self.code else None

    @property
    def is_torchs(self) -> bool:
        return "init_process_group(" in self.code and "__main__" in self.code


def blocks_of(paper: Path) -> list[Block]:
    text = paper.read_text(encoding="utf-8")
    return [
        Block(paper, text.count("\n", 0, m.start()) + 2, tuple(m["words"].split()), textwrap.dedent(m["code"]))
        for m in FENCE.finditer(text)
    ]


BLOCKS = [block for paper in PAPERS for block in blocks_of(paper)]


def run(folder: Path, *command: str) -> None:
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


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.is_ours], ids=by_name)
def test_our_scripts_run(block: Block, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    script = tmp_path / "script.py"
    script.write_text(block.code, encoding="utf-8")
    start(script, ["--run-dir=run", *STEPS, *block.words], ranks=1, logs=tmp_path)
    result = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    assert result["steps"] == 2


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.launches], ids=by_name)
def test_blocks_that_launch_run(block: Block, tmp_path: Path) -> None:
    """Two runs, in processes of their own."""
    (tmp_path / "script.py").write_text(block.code, encoding="utf-8")
    run(tmp_path, "script.py")


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.is_torchs], ids=by_name)
def test_scripts_for_torchrun_run(block: Block, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(block.code, encoding="utf-8")
    try:
        run(tmp_path, *TORCHRUN, "script.py")
    except AssertionError as error:  # torch's own processes abort at their exit now and then: not ours to mend
        if "terminate called without an active exception" not in str(error):
            raise
        run(tmp_path, *TORCHRUN, "script.py")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("block", [b for b in BLOCKS if b.peer], ids=by_name)
def test_scripts_of_peers_run(block: Block, ranks: int, tmp_path: Path) -> None:
    """On two processes as it stands, and on one."""
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
    ast.parse(block.code, block.name)


def test_blocks_are_found(tmp_path: Path) -> None:
    paper = tmp_path / "paper.md"
    paper.write_text(
        "# A\n```python\na = 1\n```\n1. two\n   ```python --set b=2\n   if a:\n       b\n   ```\n```sh\nls\n```\n"
    )
    first, second = blocks_of(paper)
    assert (first.line, first.words, first.code) == (3, (), "a = 1\n")
    assert (second.line, second.words, second.code) == (7, ("--set", "b=2"), "if a:\n    b\n")
    assert {block.paper.name for block in BLOCKS} >= {"README.md", "from-ddp.md"}
    assert {block.peer for block in BLOCKS} == {None, *PEERS}


@pytest.mark.parametrize("paper", PAPERS, ids=lambda p: p.name)
def test_links_inside_the_project_lead_somewhere(paper: Path) -> None:
    text = paper.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target:
            assert (paper.parent / target).exists(), target
