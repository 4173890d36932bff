"""A settings file: TOML, where `model.width = 64` and `[model]` with `width = 64` say the same."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unisono.config.command_line import CommandLine
from unisono.errors import SettingsError


def lines_of(file: Path, line: CommandLine = CommandLine()) -> dict[str, Any]:  # noqa: B008  (frozen)
    """Every value in the file by its dotted name, in order. Raises SettingsError where it cannot be read.

    line  what was typed, for the messages
    """
    return dict(_flat(_parsed(file, line)))


def _parsed(file: Path, line: CommandLine) -> dict[str, Any]:
    """What a TOML file holds. Raises SettingsError."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        true = "There is no such file." if missing else f"It cannot be read: {error.strerror}."
        raise SettingsError(f"--settings {file}", true, _another(file, line)) from None
    except UnicodeDecodeError:
        do = f"Save {file} as UTF-8 text, with lines like: batch = 64"
        raise SettingsError(f"--settings {file}", "It is not UTF-8 text.", do) from None
    except tomllib.TOMLDecodeError as error:
        do = f'Write in {file} lines like: batch = 64, or name = "text"'
        raise SettingsError(f"--settings {file}", f"It is not TOML: {error}.", do) from None


def _another(file: Path, line: CommandLine) -> str:
    """What to type instead: with the file that was probably meant, or with none."""
    others = {path.name: path for path in file.parent.glob("*.toml") if path.is_file()}
    near = difflib.get_close_matches(file.name, others, 1, 0.6)
    if near:
        return str(line.flag("--settings", str(others[near[0]])))
    return f"{line.without('--settings')} (without a file), or with the path of one that can be read."


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in nested tables."""
    for name, value in content.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
