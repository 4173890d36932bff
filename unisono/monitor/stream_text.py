"""Text that a terminal can show: without characters that it does not know, and without those that control it."""

from __future__ import annotations

import re
import sys
from typing import TextIO

from unisono.config.wording import wrapped
from unisono.environment import terminal_columns

COLOR = re.compile(r"\x1b\[[0-9;]*m")
CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
"""Control characters (C0, DEL and C1) except the tab."""


def visible(text: str) -> str:
    r"""Return text without colors, and with control characters written as \x1b: they could change a terminal."""
    return CONTROL.sub(lambda found: rf"\x{ord(found[0]):02x}", COLOR.sub("", text))


def write_text(stream: TextIO, text: str) -> None:
    """Write and flush text. A character without bytes in the stream's encoding (half a surrogate pair) becomes `?`.

    Raises:
        OSError, ValueError: the stream is closed, or its reader is gone.
    """
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()


def to_stderr(text: str) -> None:
    """Print text on standard error, in lines of the terminal's width: standard output may be JSON."""
    write_text(sys.stderr, wrapped(text, terminal_columns()) + "\n")
