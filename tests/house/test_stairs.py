"""The staircase: a file imports from a lower step or from its own room, and nothing else.

An import inside a function or under TYPE_CHECKING counts as well, as it is a dependency. So does a name of the package
`unisono` (`unisono.Run`), which counts as an import of the file that defines the name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.sources import LIBRARY, files, tree
from unisono import _EXPORTS, _MODULES

STEPS = {
    "security": -1,
    "errors": 0,
    "json_forms": 1,
    "profiles": 1,
    "convert": 1,
    "trackers": 1,
    "config": 2,
    "environment": 2,
    "plan": 2,
    "machine": 2,
    "handshake": 2,
    "costs": 3,
    "phases": 2,
    "tensors": 3,
    "torch_compat": 3,
    "launcher": 4,
    "clusters": 5,
    "distributed": 4,
    "data": 5,
    "parallel": 5,
    "exchange": 5,
    "checkpoint": 5,
    "monitor": 5,
    "report": 6,
    "metrics": 6,
    "train": 6,
    "export": 7,
    "prediction": 7,
    "distill": 7,
    "local_sgd": 7,
    "param_server": 7,
    "pruning": 7,
    "scaling": 7,
    "integrations": 7,
    "recipes": 8,
    "testing": 8,
    "cli": 9,
    "entrypoint": 10,
    "notebook": 11,
    "ray": 12,
    "__main__": 12,
}
WITHOUT_TORCH = (
    "security",
    "errors",
    "json_forms",
    "profiles",
    "trackers",
    "convert",
    "metrics",
    "config",
    "environment",
    "plan",
    "costs",
    "machine",
    "handshake",
    "phases",
    "launcher",
    "clusters",
)
WITHOUT_NUMPY = tuple(room for room in WITHOUT_TORCH if room != "plan")


def room_of(module: str) -> str:
    """Return the package of a module: unisono.plan.batch_order -> plan, unisono -> an empty string."""
    return module.split(".")[1] if "." in module else ""


def defining_module(name: str) -> str:
    """Return the module that `unisono.name` comes from; attributes like __file__ are those of unisono itself."""
    return "unisono" if name.startswith("__") else _EXPORTS.get(name, f"unisono.{name}")


def imports(source: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of every import in a file; names of unisono count as the module that they come from."""
    doors = set()
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                doors |= {alias.asname or "unisono"} if alias.name == "unisono" else set()
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the import in full"
            assert node.module is not None
            for alias in node.names:
                if node.module == "unisono":
                    yield node.lineno, defining_module(alias.name)
                else:
                    yield node.lineno, node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            # A table of variants may load its own room by name: import_module(f"unisono.exchange.{name}").
            text = "".join(n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))
            yield node.lineno, text.rstrip(".")
    for node in ast.walk(source):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in doors:
            yield node.lineno, defining_module(node.attr)


def breaches(room: str, source: ast.Module) -> list[str]:
    """Return the imports that a file of this package may not have."""
    found = []
    for line, module in imports(source):
        if module.split(".")[0] == "torch" and room in WITHOUT_TORCH:
            found.append(f"line {line}: {room} works without torch, and imports {module}")
        if module.split(".")[0] == "numpy" and room in WITHOUT_NUMPY:
            found.append(f"line {line}: {room} works without numpy, and imports {module}")
        other = room_of(module) if module.split(".")[0] == "unisono" else ""
        if other and other != room and STEPS[other] >= STEPS[room]:
            found.append(f"line {line}: {room} (step {STEPS[room]}) imports {module} (step {STEPS[other]})")
    return found


def private_imports_of_recipe(source: ast.Module) -> list[str]:
    """Return the imports of a recipe besides public names and its own package; with them it could not be copied."""
    return [
        f"line {node.lineno}: {name}"
        for node in ast.walk(source)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [f"unisono.{alias.name}" if node.module == "unisono" else node.module or "" for alias in node.names]
        )
        if room_of(name) not in ("", "recipes", *_MODULES)
        and name.startswith("unisono.")
        and name[len("unisono.") :] not in _EXPORTS
    ]


def test_every_file_has_a_layer() -> None:
    rooms = {path.relative_to(LIBRARY).parts[0].removesuffix(".py") for path in files("unisono")} - {"__init__"}
    assert rooms <= set(STEPS), "give the new room a step, here and in the README's picture of the house"


@pytest.mark.parametrize("path", files("unisono"), ids=lambda p: p.relative_to(LIBRARY).as_posix())
def test_imports_are_from_lower_layers(path: Path) -> None:
    room = path.relative_to(LIBRARY).parts[0].removesuffix(".py")
    if room == "__init__":
        return  # unisono/__init__.py has the names of all packages, and loads them on first use
    if room == "recipes":
        assert not private_imports_of_recipe(tree(path))
    else:
        assert not breaches(room, tree(path))


@pytest.mark.parametrize(
    ("room", "text"),
    [
        ("plan", "from unisono.distributed.init import group"),
        ("data", "def f():\n    from unisono.exchange import tree"),
        ("exchange", "if TYPE_CHECKING:\n    from unisono.train.run import Run"),
        ("config", "from unisono import environment"),
        ("monitor", "from unisono import Run"),
        ("launcher", "import unisono\nunisono.Step"),
        ("launcher", "import torch.distributed"),
        ("environment", "import numpy as np"),
        ("distributed", "importlib.import_module(f'unisono.exchange.{name}')"),
    ],
)
def test_an_import_of_a_higher_layer_is_detected(room: str, text: str) -> None:
    assert breaches(room, ast.parse(text))


def test_an_import_of_a_lower_layer_is_allowed() -> None:
    text = (
        "import unisono\nfrom unisono import phases\nfrom unisono.launcher.rank_log import x\nprint(unisono.__file__)"
    )
    assert not breaches("launcher", ast.parse(text))
    assert not private_imports_of_recipe(
        ast.parse("import unisono\nfrom unisono import DataError\nimport unisono.recipes.text")
    )
    assert private_imports_of_recipe(ast.parse("from unisono.train.run import Run"))
    assert private_imports_of_recipe(ast.parse("from unisono import phases"))
