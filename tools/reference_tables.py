"""Write the generated parts of the reference: the table of settings and the options of the commands.

    python -m tools.reference_tables build/reference

docs/reference/settings.md and docs/reference/command.md include these files.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cyclopts import App

from unisono.cli.main import build_app
from unisono.config import Settings
from unisono.config.entries import SettingEntry, entries_of
from unisono.config.value_types import kind, shown


def settings_table() -> str:
    """Return Markdown: one table for the settings without a section, and one for each section."""
    sections: dict[str, list[SettingEntry]] = {}
    for entry in entries_of(Settings):
        sections.setdefault(entry.name.rpartition(".")[0], []).append(entry)
    parts = []
    for section, rows in sections.items():
        parts += [f"## {section or 'General'}", ""]
        parts += ["| Setting | Values | Default | Meaning | Changes the bits |", "|---|---|---|---|---|"]
        parts += [
            f"| `{entry.name}` | {_cell(_values(entry))} | `{shown(entry.default)}` | {_cell(entry.help)} "
            f"| {'yes' if entry.changes_bits else ''} |"
            for entry in rows
        ]
        parts.append("")
    return "\n".join(parts)


def _values(entry: SettingEntry) -> str:
    return kind(entry.hint) + (entry.limits.words() if entry.limits else "")


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;")


def commands() -> str:
    """Return Markdown: a section for each command, with its arguments, options and examples."""
    app = build_app()
    _, *sections = re.split(r"^## unisono ", app.generate_docs(output_format="markdown"), flags=re.M)
    return "\n".join(_command(app[section.split("\n", 1)[0]], section) for section in sections)


def _command(app: App, section: str) -> str:
    section = section.replace(" -m tools.reference_tables", "", 1)  # cyclopts adds how Python was started
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
