"""Each optional package that the library imports is in an extra, and each extra that is named anywhere exists."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.house.sources import LIBRARY, ROOT, files, place, tree

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
DEVELOPMENT = {"dev", "docs"}

PACKAGE = {  # what pip calls a module, where it has another name
    "IPython": "ipykernel",  # ipython is a dependency of it, and wherever a notebook runs
    "PIL": "pillow",
    "mlflow": "mlflow-skinny",
    "pynvml": "nvidia-ml-py",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
WITH_TORCH = {"triton"}  # a part of torch's builds for CUDA
NAMED = re.compile(r"unisono\[([\w, -]+)\]")


def name_of(requirement: str) -> str:
    """Return the name of a package, as PyPI normalizes it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;]", requirement)[0]).lower()


DEPENDENCIES = {name_of(requirement) for requirement in PROJECT["dependencies"]}
OPTIONAL = {name_of(each) for extra, packages in EXTRAS.items() if extra not in DEVELOPMENT for each in packages}


def imported(path: Path) -> list[tuple[ast.AST, str]]:
    """Return the modules that a file imports by a statement, or by a call such as import_module("name")."""
    found: list[tuple[ast.AST, str]] = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append((node, node.module or ""))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if isinstance(node.args[0].value, str) and ("import" in called or called == "find_spec"):
                found.append((node, node.args[0].value))
    return [(node, module.partition(".")[0]) for node, module in found]


def test_every_import_is_of_a_dependency_or_an_extra() -> None:
    known = DEPENDENCIES | OPTIONAL | WITH_TORCH | {"unisono"}
    modules = {(place(path, node), name) for path in files("unisono") for node, name in imported(path)}
    names = {name for _, name in modules}
    assert names >= {"torch", "ray", "sklearn", "espeakng_loader", "PIL"}  # calls are found, too
    outside = {(where, name) for where, name in modules if name not in sys.stdlib_module_names}
    assert {(where, name) for where, name in outside if name_of(PACKAGE.get(name, name)) not in known} == set()
    assert set(PACKAGE) <= names, "a name in PACKAGE is imported nowhere"


@pytest.mark.parametrize("folder", ["unisono", "docs", "benchmarks"])
def test_every_extra_that_is_named_exists(folder: str) -> None:
    for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md")]:
        named = {extra.strip() for found in NAMED.findall(path.read_text("utf-8")) for extra in found.split(",")}
        assert named <= set(EXTRAS), f"{path}: {named - set(EXTRAS)}"


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
