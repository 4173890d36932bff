"""A script for another library that `unisono run` starts ends with the page that converts it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.cli.command import ROOT, Command
from unisono.cli.request.other_libraries import foreign


def unconverted_script(page: str) -> str:
    """Return the script that a page of the docs converts."""
    text = (ROOT / "docs" / "start" / page).read_text(encoding="utf-8")
    found = re.search(r"^## Before\n\n```python[^\n]*\n(.*?)^```", text, re.M | re.S)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("library", ["ddp", "accelerate", "fabric", "lightning", "torchtune"])
def test_each_page_matches_its_own_script(tmp_path: Path, library: str) -> None:
    page = f"from-{library}.md"
    script = tmp_path / "script.py"
    script.write_text(unconverted_script(page))
    found = foreign(script)
    assert found is not None
    assert found[1] == f"docs/start/{page}"


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nprint(torch.ones(2))",
        "from torch.utils.data import DataLoader",
        "import unisono\nfrom torch.utils.data import DistributedSampler",
        "from unisono import main\nfrom accelerate.utils import set_seed",
        "import helper, accelerate",
        "from package import go\nimport lightning",
        "this is not Python",
    ],
)
def test_other_scripts_match_no_page(tmp_path: Path, text: str) -> None:
    (tmp_path / "helper.py").write_text("import unisono")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from unisono import main as go")
    script = tmp_path / "script.py"
    script.write_text(text)
    assert foreign(script) is None


def test_a_ddp_script_is_answered_with_a_page(command: Command) -> None:
    (command.folder / "ddp.py").write_text(unconverted_script("from-ddp.md"))
    ended = command.run("run", "ddp.py", "--ranks", "2")
    assert ended.status == 1
    assert "environment variable RANK expected" in ended.err
    message = ended.err.splitlines()[-3:]
    assert message[0] == "ddp.py ended without calling unisono.main."
    assert message[1].startswith("  It uses torch's DistributedDataParallel.")
    assert message[2].startswith("  Next: docs/start/from-ddp.md converts such a script")


@pytest.mark.parametrize(("ranks", "status"), [pytest.param("1", 0, marks=pytest.mark.slow), ("2", 2)])
def test_a_script_that_trains_alone_is_answered_with_a_page(command: Command, ranks: str, status: int) -> None:
    (command.folder / "half.py").write_text("from torch.utils.data import DistributedSampler\nprint('trained')")
    ended = command.run("run", "half.py", "--ranks", ranks)
    assert (ended.status, ended.out) == (status, "trained\n")
    assert "docs/start/from-ddp.md" in ended.last


@pytest.mark.slow
def test_a_ddp_script_trains_under_torchrun(command: Command) -> None:
    (command.folder / "ddp.py").write_text(unconverted_script("from-ddp.md"))
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    ended = command.end(command.start_python(*start, sys.executable, "-P", "-m", "unisono.cli.main", "run", "ddp.py"))
    assert ended.status == 0, ended.err
    assert "epoch 4: loss" in ended.out
    assert ended.err.count("docs/start/from-ddp.md") == 1


def test_init_process_group_in_a_script_is_answered_with_advice(command: Command) -> None:
    command.script("import torch.distributed as dist\ndist.init_process_group('gloo')\nunisono.main(lambda run: None)")
    ended = command.run("run", "script.py", "--ranks", "2", "--set", "steps=1")
    assert ended.status == 1
    assert ended.last == "  Next: remove init_process_group and destroy_process_group (docs/start/from-ddp.md)."
