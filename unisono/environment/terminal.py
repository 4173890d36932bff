"""The terminal of this process: live lines, colors, its width, and notebooks."""

from __future__ import annotations

import os
import sys

from unisono.environment.process_variables import variables


def draws_live_lines() -> bool:
    """Return whether standard output is a terminal that can redraw a line."""
    return sys.stdout is not None and sys.stdout.isatty() and variables(("TERM",)).get("TERM") != "dumb"


def wants_color(terminal: bool) -> bool:
    """Return whether output is colored: on a terminal, or where FORCE_COLOR is set; never where NO_COLOR is set.

    See https://no-color.org and https://force-color.org. An empty value counts as not set, and so does FORCE_COLOR=0.
    """
    given = variables(("NO_COLOR", "FORCE_COLOR"))
    return not given.get("NO_COLOR") and (terminal or given.get("FORCE_COLOR", "") not in ("", "0"))


def terminal_columns() -> int:
    """Return the width of the terminal at standard output; 0: it is none, or its width is unknown."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return 0


def in_a_kernel() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return "ipykernel" in sys.modules and shell is not None
