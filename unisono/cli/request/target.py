"""What is to be run or copied: a recipe of the library by its name, or a script by its path."""

from __future__ import annotations

import difflib
import inspect
from contextlib import suppress
from pathlib import Path

import unisono.recipes
from unisono.config import CommandLine
from unisono.errors import Problem, SettingsError


def recipes() -> dict[str, Path]:
    """Every recipe's name and file."""
    folder = Path(unisono.recipes.__file__).parent
    return {path.stem: path for path in sorted(folder.glob("*.py")) if path.stem != "__init__"}


def script_of(target: str, line: CommandLine) -> Path:
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
        return str(CommandLine((*verb, other, *line.words[place + 1 :])))

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


def problems_of_train(script: Path, train: object) -> list[Problem]:
    """Return a problem if the function that the script passed to `unisono.main` does not take a run."""
    if not callable(train):
        return _not_for_a_run(script, repr(train))
    with suppress(ValueError):  # some functions of C do not say what they take
        signature = inspect.signature(train)
        try:
            signature.bind("run")
        except TypeError:
            return _not_for_a_run(script, f"{getattr(train, '__name__', repr(train))}{signature}")
    return []


def _not_for_a_run(script: Path, shown: str) -> list[Problem]:
    true = f"In {script.name} it is given {shown}, which does not take a run and nothing else."
    do = f"Write in {script.name}: def main(run):"
    return [Problem("unisono.main(main) calls main(run).", true, do)] if shown else []


def recipe_of(name: str) -> Path:
    """The file of a recipe. Raises SettingsError."""
    known = recipes()
    if name not in known:
        near = next(iter([*difflib.get_close_matches(name, known, 1, 0.6), *known]), "RECIPE")
        true = f"There is no such recipe. Recipes: {', '.join(known)}."
        raise SettingsError(f"unisono copy {name}", true, f"unisono copy {near}")
    return known[name]
