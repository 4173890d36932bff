"""Find the target of a command: a recipe of the library by its name, or a script by its path."""

from __future__ import annotations

import difflib
import inspect
from contextlib import suppress
from pathlib import Path

import unisono.recipes
from unisono.config import CommandLine
from unisono.errors import Problem, SettingsError


def recipes() -> dict[str, Path]:
    """Return the file of every recipe by its name."""
    folder = Path(unisono.recipes.__file__).parent
    return {path.stem: path for path in sorted(folder.glob("*.py")) if path.stem != "__init__"}


def script_of(target: str, line: CommandLine) -> Path:
    """Return the script that a target names.

    Args:
        target: the name of a recipe, or the path of a script.
        line: the typed command, for messages.

    Raises:
        SettingsError: if there is no such recipe or script.
    """
    place = line.words.index(target) if target in line.words else 2  # after a flag: doctor --rehearse TARGET
    known, verb = recipes(), line.words[:place]
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
        raise SettingsError(f"{target} is a folder.", "A target is a recipe or a script.", do)
    here = [str(p) for p in sorted((path.parent if path.parent.is_dir() else Path()).glob("*.py"))]
    stems = {Path(name).stem: name for name in [*here, *known]}
    near = difflib.get_close_matches(path.stem, stems, 1, 0.6)
    do = instead(stems[near[0]]) if near else f"{' '.join(line.words[:2])} --help"
    raise SettingsError(f"There is no recipe or script {target}.", f"The recipes are {', '.join(known)}.", do)


def problems_of_train(script: Path, train: object) -> list[Problem]:
    """Return a problem if the function that the script passed to `unisono.main` does not take a run."""
    if not callable(train):
        return _wrong_signature(script, repr(train))
    with suppress(ValueError):  # some functions written in C have no signature
        signature = inspect.signature(train)
        try:
            signature.bind("run")
        except TypeError:
            return _wrong_signature(script, f"{getattr(train, '__name__', repr(train))}{signature}")
    return []


def _wrong_signature(script: Path, shown: str) -> list[Problem]:
    facts = f"{script.name} passes {shown}, and unisono.main(main) calls main(run)."
    do = f"Write in {script.name}: def main(run):"
    return [Problem("The function for unisono.main does not take a run.", facts, do)] if shown else []


def recipe_of(name: str) -> Path:
    """Return the file of a recipe. Raises SettingsError."""
    known = recipes()
    if name not in known:
        near = next(iter([*difflib.get_close_matches(name, known, 1, 0.6), *known]), "RECIPE")
        facts = f"The recipes are {', '.join(known)}."
        raise SettingsError(f"There is no recipe {name}.", facts, f"unisono copy {near}")
    return known[name]
