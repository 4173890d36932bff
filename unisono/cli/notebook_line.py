"""The progress line in a notebook: HTML that is updated in place, without widgets.

A notebook that is saved has the last state, also as plain text.
"""

from __future__ import annotations

import re
from html import escape
from typing import Any

STEP = re.compile(r"step (\d+)/(\d+)\b")
STYLE = "font-family: monospace; white-space: pre-wrap"


class NotebookLine:
    """One output of a cell."""

    def __init__(self) -> None:
        self.text = ""
        self._handle: Any = None

    def show(self, text: str) -> None:
        """Replace the line."""
        from IPython.display import display  # here, because only a notebook needs it

        self.text = text
        content = {"text/html": html_of(text), "text/plain": text}
        if self._handle is None:
            show: Any = display
            self._handle = show(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


def html_of(text: str) -> str:
    """Return a line as HTML, with a bar if it begins with "step 3/10"."""
    found = STEP.match(text)
    bar = ""
    if found is not None:
        bar = f'<progress value="{found[1]}" max="{found[2]}" style="width: 12em"></progress> '
    return f'<div style="{STYLE}">{bar}{escape(text)}</div>'
