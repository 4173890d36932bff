"""Rules of style that a test can check: sizes of files and folders, one reader of the environment, a light import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.house.sources import LIBRARY, ROOT, code_lines, files, place, tree

CODE_LINES = 400  # of a file, without docstrings, comments and blank lines
MODULES = 12  # in a folder, which is one concept
FUNCTION_LINES = 70  # from `def` to its end, docstring included
NO_HOME = {"utils", "util", "helpers", "helper", "misc", "common"}  # a helper lives with its owner

READER = LIBRARY / "environment" / "process_variables.py"
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def test_files_have_few_lines_of_code() -> None:
    lines = {path: code_lines(path) for path in files("unisono")}
    print(f"{sum(lines.values())} lines of code in the library")
    others = [path for path in files("tests", "benchmarks") if path.read_bytes().count(b"\n") > CODE_LINES]
    lines |= {path: code_lines(path) for path in others}
    assert {str(path.relative_to(ROOT)): n for path, n in lines.items() if n > CODE_LINES} == {}


def test_folders_have_few_modules() -> None:
    folders = Counter(path.parent.relative_to(ROOT).as_posix() for path in files("unisono") if path.stem != "__init__")
    del folders["unisono/recipes"]  # a catalog: each module is a script, which `unisono run NAME` finds there
    assert {folder: count for folder, count in folders.items() if count > MODULES} == {}


def test_no_two_modules_have_one_name() -> None:
    stems = Counter(path.stem for path in files("unisono") if path.stem not in ("__init__", "__main__", "main"))
    assert {stem: count for stem, count in stems.items() if count > 1} == {}


def test_functions_fit_on_one_screen() -> None:
    long = {
        place(path, node): f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for path in files("unisono", "tests", "benchmarks")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= FUNCTION_LINES
    }
    assert long == {}


def test_no_module_is_named_utils_or_the_like() -> None:
    assert [str(path.relative_to(ROOT)) for path in files("unisono") if NO_HOME & {*path.parts, path.stem}] == []


def test_every_file_says_what_it_is() -> None:
    assert [str(path.relative_to(ROOT)) for path in files("unisono") if not ast.get_docstring(tree(path))] == []


def test_one_file_reads_the_environment() -> None:
    """Children get their variables from it (`environment.inherited`). No code writes to its own environment."""
    readers = {}
    for path in files("unisono"):
        for node in ast.walk(tree(path)):
            names = (
                {node.attr}
                if isinstance(node, ast.Attribute)
                else {node.id}
                if isinstance(node, ast.Name)
                else {alias.name for alias in node.names}
                if isinstance(node, ast.ImportFrom) and node.module in ("os", "posix")
                else set()
            )
            if names & ENVIRONMENT:
                readers[place(path, node)] = path
    assert {where for where, path in readers.items() if path != READER} == set()
    written = [
        node
        for node in ast.walk(tree(READER))
        if isinstance(node, ast.Subscript)
        and "environ" in ast.unparse(node.value)
        and not isinstance(node.ctx, ast.Load)
    ]
    assert written == []


def loaded_by(program: str) -> set[str]:
    """Return the top-level modules and those of Unisono that a new Python process loads for this program."""
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nprint('loaded', *sys.modules)"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=True,
    )
    return set(done.stdout.splitlines()[-1].split()[1:])


HELP = """
import runpy, sys
sys.argv = ["unisono", *{arguments}]
try:
    runpy.run_module("unisono.cli.main", run_name="__main__")
except SystemExit as leave:
    assert not leave.code, leave.code
"""


@pytest.mark.parametrize(
    "program",
    [
        "import sys, unisono; unisono.__version__, unisono.SettingsError, unisono.Settings, unisono.World",
        HELP.format(arguments=["--help"]),
        HELP.format(arguments=["run", "--help"]),
    ],
    ids=["import", "help", "run-help"],
)
def test_importing_unisono_is_light(program: str) -> None:
    modules = loaded_by(program)
    assert "unisono.errors" in modules
    assert modules & {"torch", "numpy", "safetensors", "fsspec"} == set()


def test_every_public_name_can_be_imported() -> None:
    """Every public name can be imported, and the error for an unknown name lists them."""
    import unisono

    for name in unisono.__all__:
        assert getattr(unisono, name) is not None
    with pytest.raises(AttributeError, match="it has __version__, main"):
        unisono.nothing  # noqa: B018


def pins(file: str) -> dict[str, str]:
    """Return the version of each package in a file of pins."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    found = (re.match(r"([\w.-]+)==([\w.+!-]+)", line) for line in lines)
    return {re.sub(r"[-_.]+", "-", match[1]).lower(): match[2] for match in found if match}


def test_every_pinned_package_but_torch_has_hashes() -> None:
    """`make lock` writes hashes.txt."""
    wanted = pins("constraints.txt")
    assert wanted.pop("torch")
    assert pins("hashes.txt") == wanted
    blocks = re.split(r"\n(?=\S)", (ROOT / "hashes.txt").read_text(encoding="utf-8").strip())
    assert len(blocks) == len(wanted)
    assert [block for block in blocks if not re.search(r"--hash=sha256:[0-9a-f]{64}\b", block)] == []


def test_ids_of_tests_have_no_escaped_bytes(request: pytest.FixtureRequest) -> None:
    """Bytes in an id may differ between the workers of pytest-xdist (gzip writes the time), and then no test runs."""
    assert [item.nodeid for item in request.session.items if re.search(r"\\x[0-9a-f]{2}", item.nodeid)] == []


def test_no_file_contains_a_path_of_a_home_folder() -> None:
    """No published file contains a path of a home folder."""
    homes = {str(Path.home()), str(ROOT)} - {"/"}
    folders = [ROOT / name for name in ("unisono", "tests", "benchmarks", "docs", ".ci")]
    paths = [*ROOT.glob("*"), *(path for folder in folders for path in folder.rglob("*"))]
    for path in paths:
        if path.is_file() and path.suffix != ".pyc":
            text = path.read_text(encoding="utf-8", errors="ignore")
            assert not [home for home in homes if home in text], path
