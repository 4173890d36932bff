"""The structure of the library: no import circle, no class of the loop made at run time, and a small `Run`.

An import under TYPE_CHECKING or inside a function counts as well: a reader has to know that module, too.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping

from tests.house.sources import LIBRARY, files, tree
from tests.house.test_stairs import imports
from unisono.train.run import Run

CIRCLES: Mapping[str, int] = {
    "unisono.distributed": 6,
    "unisono.data": 3,
    "unisono.parallel": 2,
    "unisono.cli": 2,
    "unisono.config": 2,
}
"""Modules of the largest import circle in a package. Each number may only fall; a package that is not here has none."""

ATTRIBUTES, METHODS = 15, 20  # of Run


def graph() -> dict[str, set[str]]:
    """Return, for each module, those that it imports. The public names of `unisono` are imported when they are used."""
    paths = {}
    for path in files("unisono"):
        name = "unisono." + path.relative_to(LIBRARY).with_suffix("").as_posix().replace("/", ".")
        paths[name.removesuffix(".__init__")] = path
    found: dict[str, set[str]] = {}
    for name, path in paths.items():
        source = tree(path)
        wanted = {module for _, module in imports(source)}
        wanted |= {
            f"{node.module}.{alias.name}"
            for node in ast.walk(source)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }
        found[name] = wanted & paths.keys() - {name, "unisono"}
    return {
        name: {other for other in others if not any(more.startswith(f"{other}.") for more in others)}
        for name, others in found.items()
    }


def circles(edges: Mapping[str, set[str]]) -> Iterator[set[str]]:
    """Yield the sets of modules that import each other, directly or not (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    done: list[set[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in edges[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            done.append(set(stack[at:]))
            del stack[at:]

    for name in edges:
        if name not in index:
            visit(name)
    yield from (each for each in done if len(each) > 1)


def test_modules_do_not_import_each_other_in_circles() -> None:
    found: dict[str, set[str]] = {}
    for circle in circles(graph()):
        package = ".".join(min(circle).split(".")[:2])
        found[package] = max(circle, found.get(package, set()), key=len)
    assert {p: sorted(circle) for p, circle in found.items() if len(circle) > CIRCLES.get(p, 1)} == {}


def test_a_circle_is_seen() -> None:
    assert list(circles({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == [{"b", "c"}]
    assert not list(circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}))


def test_the_training_loop_makes_no_class_at_run_time() -> None:
    made = [
        f"{path.relative_to(LIBRARY)}:{node.lineno}"
        for path in files("unisono/train", "unisono/local_sgd", "unisono/param_server")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type"
        if len(node.args) == 3
    ]
    assert made == []


def test_run_is_small() -> None:
    methods = [name for name, value in vars(Run).items() if inspect.isfunction(value) or isinstance(value, property)]
    attributes = {
        node.attr
        for node in ast.walk(tree(LIBRARY / "train" / "run.py"))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    assert len(methods) <= METHODS, methods
    assert len(attributes) <= ATTRIBUTES, attributes


def test_nothing_inherits_from_run_or_step_but_the_dry_run() -> None:
    bases = {
        f"{path.relative_to(LIBRARY)}: {node.name}"
        for path in files("unisono")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if ast.unparse(base).split("[")[0] in ("Run", "Step")
    }
    assert bases == {"train/diagnostics/dry_run.py: DryRun"}
