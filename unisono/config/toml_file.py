"""Settings files: TOML, where `model.width = 64` and `[model]` with `width = 64` mean the same."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unisono.config.command_line import CommandLine
from unisono.config.entries import flatten
from unisono.config.value_types import toml
from unisono.errors import SettingsError
from unisono.security.masking import masked


def read_values(file: Path, line: CommandLine = CommandLine()) -> dict[str, Any]:  # noqa: B008  (frozen)
    """Return every value in the file by its dotted name, in order.

    Args:
        file: the settings file.
        line: the typed command, for messages.

    Raises:
        SettingsError: if the file cannot be read, or is not TOML.
    """
    return dict(flat_items(_parsed(file, line)))


def read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values and sources in a file that `provenance_lines` wrote, both by dotted name. "none" becomes None.

    Raises:
        SettingsError: if the file cannot be read, or is not TOML.
    """
    values = {name: None if value == "none" else value for name, value in read_values(path).items()}
    sources = {}
    for line in path.read_text(encoding="utf-8").split("\n"):
        assignment, mark, source = line.rpartition("  # ")  # the comment comes last, whatever a text value contains
        if mark:
            sources[assignment.partition(" = ")[0]] = source.strip()
    return values, sources


def provenance_lines(settings: Any, sources: Mapping[str, str]) -> str:
    """Return TOML with one line for each value and its source as a comment. `--settings` takes such a file, too.

    Secrets are masked.
    """
    lines = [(f"{name} = {toml(masked(name, value))}", sources[name]) for name, value in flatten(settings).items()]
    width = min(40, max(len(line) for line, _ in lines))
    return "".join(f"{line:{width}}  # {source}\n" for line, source in lines)


def _parsed(file: Path, line: CommandLine) -> dict[str, Any]:
    """Return the content of a TOML file."""
    error = f"Cannot read the settings file {file}."
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(error, "There is no such file.", _alternative(file, line)) from None
    except OSError as failure:
        raise SettingsError(error, f"{failure.strerror}.", _alternative(file, line)) from None
    except UnicodeDecodeError:
        do = f"Save {file} as UTF-8 text, with lines like: batch = 64"
        raise SettingsError(error, "It is not UTF-8 text.", do) from None
    except tomllib.TOMLDecodeError as failure:
        do = f'Write in {file} lines like: batch = 64, or name = "text"'
        raise SettingsError(error, f"It is not TOML: {failure}.", do) from None


def _alternative(file: Path, line: CommandLine) -> str:
    """Return the command with the settings file that was probably meant, or without one."""
    others = {path.name: path for path in file.parent.glob("*.toml") if path.is_file()}
    near = difflib.get_close_matches(file.name, others, 1, 0.6)
    if near:
        return str(line.flag("--settings", str(others[near[0]])))
    return f"{line.without('--settings')} (without a file), or with the path of a readable one."


def flat_items(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of everything in nested tables of TOML."""
    for name, value in content.items():
        if isinstance(value, dict) and value:
            yield from flat_items(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
