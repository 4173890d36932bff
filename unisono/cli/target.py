"""What is to be run or copied: a recipe of the library by its name, or a script by its path."""

from __future__ import annotations

import difflib
from pathlib import Path

import unisono.recipes
from unisono.errors import SettingsError
from unisono.settings import Line


def recipes() -> dict[str, Path]:
    """Every recipe's name and file."""
    folder = Path(unisono.recipes.__file__).parent
    return {path.stem: path for path in sorted(folder.glob("*.py")) if path.stem != "__init__"}


def script_of(target: str, line: Line) -> Path:
    """The script that `unisono run TARGET` means, or `check`; `line` is what was typed. Raises SettingsError."""
    place = line.words.index(target) if target in line.words else 2  # behind a flag: doctor --rehearse TARGET
    known, verb = recipes(), line.words[:place]
    asked = f"{' '.join(verb)} {target}"
    if target in known:
        return known[target]
    path = Path(target)
    if path.is_file():
        return path

    def instead(other: str) -> str:
        return str(Line((*verb, other, *line.words[place + 1 :])))

    if path.is_dir():
        scripts = sorted(path.glob("*.py"))
        do = instead(str(scripts[0]) if scripts else f"{path}/SCRIPT.py")
        raise SettingsError(asked, "It is a folder, not a script.", do)
    here = [str(p) for p in sorted((path.parent if path.parent.is_dir() else Path()).glob("*.py"))]
    stems = {Path(name).stem: name for name in [*here, *known]}
    near = difflib.get_close_matches(path.stem, stems, 1, 0.6)
    do = instead(stems[near[0]]) if near else f"{' '.join(line.words[:2])} --help"
    true = f"There is no such recipe and no such file. Recipes: {', '.join(known)}."
    raise SettingsError(asked, true, do)


def recipe_of(name: str) -> Path:
    """The file of a recipe. Raises SettingsError."""
    known = recipes()
    if name not in known:
        near = next(iter([*difflib.get_close_matches(name, known, 1, 0.6), *known]), "RECIPE")
        true = f"There is no such recipe. Recipes: {', '.join(known)}."
        raise SettingsError(f"unisono copy {name}", true, f"unisono copy {near}")
    return known[name]
