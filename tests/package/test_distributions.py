"""The wheel and the sdist: what they have, and that the wheel runs where nothing of the repository is."""

from __future__ import annotations

import json
import re
import runpy
import zipfile
from pathlib import Path

import pytest

from tests.house.sources import ROOT
from tests.package.builds import (
    build_sdist,
    build_wheel,
    copy_of_sources,
    environment_with,
    run,
    tracked_or_skip,
    unpacked,
)
from tools.distributions import RELATIVE_LINK, sdist_problems, wheel_problems

README = "# Unisono\n[a\nb](pages/a.md#x) ![Runs.](docs/run.svg) [c](https://c.org)\n```python\nf: Run[S](x)\n```\n"

SCRIPT = """
import torch
import unisono

def main(run):
    model = run.place(lambda: torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps([torch.tensor([float(i), 1.0]) for i in range(64)]):
        for x in step:
            step.backward(model(x).sum(), weight=len(x))
        step.update(optimizer)

unisono.main(main)
"""


@pytest.mark.ci
@pytest.mark.timeout(600)  # builds and installs, and starts eight processes that load torch
def test_the_packages_are_complete_and_the_wheel_runs_elsewhere(tmp_path: Path) -> None:
    """Build the wheel from the sdist, as `python -m build` does, and use its command from another folder."""
    tracked = tracked_or_skip()
    for name in ("sdist", "wheel", "unpacked", "elsewhere"):
        (tmp_path / name).mkdir()
    sdist = build_sdist(copy_of_sources(tracked, tmp_path / "source"), tmp_path / "sdist")
    assert sdist_problems(sdist, tracked) == []
    wheel = build_wheel(unpacked(sdist, tmp_path / "unpacked"), tmp_path / "wheel")
    assert wheel_problems(wheel, tracked) == []

    programs = environment_with(tmp_path / "environment", wheel)
    unisono, elsewhere = programs / "unisono", tmp_path / "elsewhere"
    place = run(programs / "python", "-c", "import unisono; print(unisono.__file__)", folder=elsewhere)
    assert Path(place.strip()).is_relative_to(tmp_path / "environment")
    run(unisono, "run", "topics", "--ranks", "2", "--set", "steps=2", "--run-dir", "out", folder=elsewhere)
    assert json.loads((elsewhere / "out" / "result.json").read_text())["promise"] == "exact"
    (elsewhere / "script.py").write_text(SCRIPT)
    assert "Placement-proof" in run(unisono, "check", "script.py", "--set", "steps=3", folder=elsewhere)
    run(unisono, "report", "out", folder=elsewhere)
    assert "uPlot" in (elsewhere / "out" / "report.html").read_text(encoding="utf-8")
    run(unisono, "copy", "text", "mine.py", folder=elsewhere)
    assert (elsewhere / "mine.py").read_text() == (ROOT / "unisono/recipes/text.py").read_text()


def test_missing_files_and_relative_links_are_found(tmp_path: Path) -> None:
    wheel = tmp_path / "unisono-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("unisono/a.py", "")
        file.writestr("unisono/b.py", "")
        file.writestr("unisono-1.0.dist-info/METADATA", f"Description-Content-Type: text/markdown\n\n{README}")
    assert wheel_problems(wheel, {"unisono/a.py", "unisono/page.css", "pages/a.md"}) == [
        f"{wheel.name} lacks unisono/page.css.",
        f"{wheel.name} has unisono/b.py, which git does not have.",
        f"{wheel.name} has no LICENSE.",
        f"The README of {wheel.name} has the relative link pages/a.md#x.",
        f"The README of {wheel.name} has the relative link docs/run.svg.",
        f"The README of {wheel.name} has the relative link x.",
    ]


@pytest.mark.filterwarnings("ignore:The distutils package is deprecated")  # if setuptools is imported late
def test_links_of_the_readme_lead_to_the_repository() -> None:
    published = runpy.run_path(str(ROOT / "setup.py"))["published_readme"]
    assert published("[a\nb](pages/a.md#x) ![Runs.](docs/run.svg) [c](https://c.org)", "https://h/o/u/", "v1") == (
        "[a\nb](https://h/o/u/blob/v1/pages/a.md#x) ![Runs.](https://h/o/u/raw/v1/docs/run.svg) [c](https://c.org)"
    )
    without = published("[a\nb](pages/a.md#x) ![Runs.](docs/run.svg) [c](https://c.org)\n", None, "v1")
    assert without.startswith("a\nb *Runs.* [c](https://c.org)\n\nThe pages")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert RELATIVE_LINK.search(text)
    for address in (None, "https://h/o/u"):
        shown = published(text, address, "v1")
        assert RELATIVE_LINK.search(shown) is None
        assert re.findall(r"```python.*?```", shown, re.S) == re.findall(r"```python.*?```", text, re.S)
