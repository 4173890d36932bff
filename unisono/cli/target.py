"""What is to be run or copied: a recipe of the library by its name, or a script by its path."""

from __future__ import annotations

import difflib
from pathlib import Path

import unisono.recipes
from unisono.errors import SettingsError

NOT_RECIPES = {"__init__", "corpora"}


def recipes() -> dict[str, Path]:
    """Every recipe's name and file."""
    folder = Path(unisono.recipes.__file__).parent
    return {path.stem: path for path in sorted(folder.glob("*.py")) if path.stem not in NOT_RECIPES}


def script_of(target: str) -> Path:
    """The script that `unisono run TARGET` means. Raises SettingsError."""
    known = recipes()
    if target in known:
        return known[target]
    path = Path(target)
    if path.is_file():
        return path
    if path.is_dir():
        scripts = sorted(path.glob("*.py"))
        do = f"unisono run {scripts[0]}" if scripts else f"unisono run {path}/SCRIPT.py"
        raise SettingsError(f"unisono run {target}", "It is a folder, not a script.", do)
    here = [str(p) for p in sorted((path.parent if path.parent.is_dir() else Path()).glob("*.py"))]
    near = difflib.get_close_matches(target, [*known, *here], 1, 0.6)
    true = f"There is no such recipe and no such file. Recipes: {', '.join(known)}."
    raise SettingsError(f"unisono run {target}", true, f"unisono run {next(iter([*near, *known]), 'SCRIPT.py')}")


def recipe_of(name: str) -> Path:
    """The file of a recipe. Raises SettingsError."""
    known = recipes()
    if name not in known:
        near = next(iter([*difflib.get_close_matches(name, known, 1, 0.6), *known]), "RECIPE")
        true = f"There is no such recipe. There are {', '.join(known)}."
        raise SettingsError(f"unisono copy {name}", true, f"unisono copy {near}")
    return known[name]
