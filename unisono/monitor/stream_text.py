"""Write text to a stream that may not know all of its characters."""

from __future__ import annotations

from typing import TextIO


def write_text(stream: TextIO, text: str) -> None:
    """Write and flush text. A character without bytes in the stream's encoding (half a surrogate pair) becomes `?`.

    Errors:
        OSError, ValueError: the stream is closed, or its reader is gone.
    """
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()
