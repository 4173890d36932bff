"""The settings of a script in words: the table below `--help`, and the settings reference of the docs."""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from unisono.config import entries_of, kind, plain, shown
from unisono.config.entries import library_settings
from unisono.config.value_types import choices_of
from unisono.security.masking import masked

WIDTH = 79
"""Characters in a line of `--help`."""


def settings_table(settings: type) -> str:
    """Return the settings of a class with their defaults and help texts, one per line, the script's own first."""
    comments = field_comments(settings)
    entries = sorted(entries_of(settings), key=lambda entry: entry.source != "script")
    rows = [
        (e.name, shown(masked(e.name, e.default)), _with_choices(e.hint, e.help or comments.get(e.name, "")))
        for e in entries
    ]
    name_width = max(len(name) for name, _, _ in rows)
    value_width = min(10, max(len(value) for _, value, _ in rows))
    indent = f"{'':{name_width + value_width + 4}}"
    lines = []
    for name, value, text in rows:
        first, *more = textwrap.wrap(text, max(WIDTH - len(indent), 20)) or [""]
        lines += [f"  {name:{name_width}} {value:{value_width}} {first}", *(indent + words for words in more)]
    return "\n".join(["Settings with their defaults; change one with --set NAME=VALUE:", *lines])


def _with_choices(hint: Any, text: str) -> str:
    """Return the help text with the choices of the type, unless it names them all; without a text, the type."""
    choices = [shown(choice) for choice in choices_of(hint)]
    if not text or all(choice in text for choice in choices):
        return text or kind(hint)
    return f"{text} ({', '.join(choices)})"


def description_of(settings: type) -> dict[str, Any]:
    """Return what JSON can hold of a script's settings (request_checks.ScriptReport)."""
    entries = list(entries_of(settings))
    ours = library_settings()
    defaults = {e.name: plain(e.default) for e in entries if e.name in ours and e.source == "script"}
    return {
        "names": [entry.name for entry in entries],
        "table": settings_table(settings),
        "defaults": {name: "none" if value is None else value for name, value in defaults.items()},
        "kinds": {entry.name: kind(entry.hint) for entry in entries},
        "results": [entry.name for entry in entries if entry.changes_bits],
    }


def field_comments(cls: type, prefix: str = "") -> dict[str, str]:
    """Return the comment after each field by its dotted name: `lr: float = 3e-4  # peak learning rate`."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if "__dataclass_fields__" in base.__dict__:
            found |= {prefix + name: comment for name, comment in _comments_in(base).items()}
    for f in fields(cls):
        section = f.default_factory() if f.default_factory is not MISSING else f.default
        if is_dataclass(section) and not isinstance(section, type):
            found |= field_comments(type(section), f"{prefix}{f.name}.")
    return found


def _comments_in(cls: type) -> dict[str, str]:
    """Return the comments after the fields that this class itself defines."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
        (definition,) = ast.parse(source).body
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (OSError, TypeError, ValueError, SyntaxError, tokenize.TokenError):
        return {}
    comments = {t.start[0]: t.string.lstrip("# ").rstrip() for t in tokens if t.type == tokenize.COMMENT}
    assert isinstance(definition, ast.ClassDef)
    return {
        statement.target.id: comments[statement.end_lineno]
        for statement in definition.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and statement.end_lineno in comments
    }
