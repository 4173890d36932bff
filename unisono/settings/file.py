"""A settings file: TOML, where `model.width = 64` and `[model]` with `width = 64` say the same."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unisono.errors import SettingsError


def lines_of(file: Path) -> dict[str, Any]:
    """Every value in the file by its dotted name, in order. Raises SettingsError where it cannot be read."""
    return dict(_flat(_parsed(file)))


def _parsed(file: Path) -> dict[str, Any]:
    """What a TOML file holds. Raises SettingsError."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        do = f"Check the path: you are in {Path.cwd()}."
        raise SettingsError(f"--settings {file}", "There is no such file.", do) from None
    except OSError as error:
        raise SettingsError(f"--settings {file}", f"It cannot be read: {error.strerror}.", "Check the path.") from None
    except UnicodeDecodeError:
        do = "Save it as UTF-8 text, with lines like: batch = 64"
        raise SettingsError(f"--settings {file}", "It is not UTF-8 text.", do) from None
    except tomllib.TOMLDecodeError as error:
        do = 'Write lines like: batch = 64, or name = "text"'
        raise SettingsError(f"--settings {file}", f"It is not TOML: {error}.", do) from None


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in nested tables."""
    for name, value in content.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
