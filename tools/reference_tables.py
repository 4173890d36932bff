"""Write the generated parts of the reference: the table of settings and the options of the commands.

    python -m tools.reference_tables build/reference

docs/reference/settings.md and docs/reference/command.md include these files.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from cyclopts import App

from unisono.cli.main import build_app
from unisono.config import Settings
from unisono.config.schema import SETTING_INFO
from unisono.config.value_types import kind, shown


class SettingRow(NamedTuple):
    """One setting: its full name, what values it takes, its default, and what it means."""

    name: str
    values: str
    default: str
    meaning: str
    changes_bits: bool


def settings_of(cls: type, prefix: str = "") -> Iterator[SettingRow]:
    """Yield the settings of a class and of its sections, in the order of their definition."""
    hints = get_type_hints(cls)
    for field in fields(cls):
        name = f"{prefix}{field.name}"
        default: Any = field.default if field.default_factory is MISSING else field.default_factory()
        if is_dataclass(default):
            yield from settings_of(type(default), f"{name}.")
        else:
            meaning, changes_bits = SETTING_INFO[name]
            yield SettingRow(name, kind(hints[field.name]), shown(default), meaning, changes_bits)


def settings_table() -> str:
    """Return Markdown: one table for the settings without a section, and one for each section."""
    sections: dict[str, list[SettingRow]] = {}
    for row in settings_of(Settings):
        sections.setdefault(row.name.rpartition(".")[0], []).append(row)
    parts = []
    for section, rows in sections.items():
        parts += [f"## {section or 'General'}", ""]
        parts += ["| Setting | Values | Default | Meaning | Changes the bits |", "|---|---|---|---|---|"]
        parts += [
            f"| `{row.name}` | {_cell(row.values)} | `{row.default}` | {_cell(row.meaning)} "
            f"| {'yes' if row.changes_bits else ''} |"
            for row in rows
        ]
        parts.append("")
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;")


def commands() -> str:
    """Return Markdown: a section for each command, with its arguments, options and examples."""
    app = build_app()
    _, *sections = re.split(r"^## unisono ", app.generate_docs(output_format="markdown"), flags=re.M)
    return "\n".join(_command(app[section.split("\n", 1)[0]], section) for section in sections)


def _command(app: App, section: str) -> str:
    examples = f"\n```text\n{app.help_epilogue.strip()}\n```\n" if app.help_epilogue else ""
    return f"## unisono {section.strip()}\n{examples}"


def main() -> None:
    """Write settings.md and command.md to the folder that the command line names."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.md").write_text(settings_table(), encoding="utf-8")
    (folder / "command.md").write_text(commands(), encoding="utf-8")


if __name__ == "__main__":
    main()
