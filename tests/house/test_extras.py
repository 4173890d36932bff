"""Each optional package that the library imports is in an extra, and each extra that is named anywhere exists."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.house.sources import LIBRARY, ROOT, files
from unisono.cli.commands.doctor import NEEDED

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
DEVELOPMENT = {"dev", "docs"}

PACKAGE = {  # what pip calls a module, where it has another name
    "IPython": "ipykernel",  # ipython is a dependency of it, and wherever a notebook runs
    "PIL": "pillow",
    "mlflow": "mlflow-skinny",
    "pynvml": "nvidia-ml-py",
    "sklearn": "scikit-learn",
    "sqlalchemy": "optuna",  # a dependency of it
    "yaml": "pyyaml",
}
WITH_TORCH = {"triton"}  # a part of torch's builds for CUDA
STATEMENT = re.compile(r"^ *(?:from ([\w.]+) import\b|import ([\w.]+)(?: as \w+)?\s*(?:#.*)?$)", re.M)
CALL = re.compile(r"(?:import\w*|find_spec)\(\s*\"([\w.]+)\"")
NAMED = re.compile(r"unisono\[([\w, -]+)\]")


def name_of(requirement: str) -> str:
    """Return the name of a package, as PyPI normalizes it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;]", requirement)[0]).lower()


DEPENDENCIES = {name_of(requirement) for requirement in PROJECT["dependencies"]}
OPTIONAL = {name_of(each) for extra, packages in EXTRAS.items() if extra not in DEVELOPMENT for each in packages}


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports by a statement, or by a call such as import_module("name").

    Expressions are quicker than parsing the whole library once more.
    """
    text = path.read_text(encoding="utf-8")
    found = {name for words in STATEMENT.findall(text) for name in words if name}
    return {module.partition(".")[0] for module in found | set(CALL.findall(text))}


def test_every_import_is_of_a_dependency_or_an_extra() -> None:
    known = DEPENDENCIES | OPTIONAL | WITH_TORCH | {"unisono"}
    modules = {(str(path.relative_to(ROOT)), name) for path in files("unisono") for name in imported(path)}
    names = {name for _, name in modules}
    assert names >= {"torch", "ray", "sklearn", "espeakng_loader", "PIL"}  # calls are found, too
    outside = {(path, name) for path, name in modules if name not in sys.stdlib_module_names}
    assert {(path, name) for path, name in outside if name_of(PACKAGE.get(name, name)) not in known} == set()
    assert set(PACKAGE) <= names, "a name in PACKAGE is imported nowhere"


@pytest.mark.parametrize("folder", ["unisono", "docs", "benchmarks"])
def test_every_extra_that_is_named_exists(folder: str) -> None:
    for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md")]:
        named = {extra.strip() for found in NAMED.findall(path.read_text("utf-8")) for extra in found.split(",")}
        assert named <= set(EXTRAS), f"{path}: {named - set(EXTRAS)}"


def test_doctor_reports_every_dependency() -> None:
    assert set(NEEDED) == DEPENDENCIES


def test_extras_of_extras_exist() -> None:
    named = {extra for packages in EXTRAS.values() for each in packages for extra in NAMED.findall(each)}
    assert {extra for found in named for extra in found.split(",")} <= set(EXTRAS)


def test_the_table_has_every_extra() -> None:
    table = (ROOT / "docs/start/install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == set(EXTRAS) - DEVELOPMENT


def test_dev_has_what_the_tests_need() -> None:
    """Extras that are not in dev are large, and their tests are skipped without them."""
    dev = {extra for each in EXTRAS["dev"] for found in NAMED.findall(each) for extra in found.split(",")}
    inside = dev | {extra for each in dev for packages in EXTRAS[each] for extra in sum_of(packages)}
    assert set(EXTRAS) - inside - DEVELOPMENT == {"executorch", "export", "gguf", "hf", "ray"}


def sum_of(requirement: str) -> list[str]:
    """Return the extras of this project that a requirement names."""
    return [extra for found in NAMED.findall(requirement) for extra in found.split(",")]


def test_the_version_is_in_one_place() -> None:
    assert "version" in PROJECT["dynamic"]
    assert re.search(r'^__version__ = "\d+\.\d+\.\d+\w*"$', (LIBRARY / "__init__.py").read_text("utf-8"), re.M)
