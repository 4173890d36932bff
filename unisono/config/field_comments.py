"""What a script says of its settings, for `--help`: the comment behind each field.

lr: float = 3e-4  # the highest; it warms up to there
"""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
from dataclasses import MISSING, fields, is_dataclass


def comments_of(cls: type, before: str = "") -> dict[str, str]:
    """Dotted name -> comment, of all settings that have one and whose source can be had."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if "__dataclass_fields__" in base.__dict__:
            found |= {before + name: comment for name, comment in _behind_fields(base).items()}
    for f in fields(cls):
        section = f.default_factory() if f.default_factory is not MISSING else f.default
        if is_dataclass(section) and not isinstance(section, type):
            found |= comments_of(type(section), f"{before}{f.name}.")
    return found


def _behind_fields(cls: type) -> dict[str, str]:
    """Of the fields that this class itself names."""
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
