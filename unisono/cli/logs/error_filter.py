"""Choose the errors of a log: records of level ERROR and above, tracebacks, and the last lines of a dead process.

The lines of a record that follow its first line are indented. Another traceback is followed to its end: its frames, the
message, and the tracebacks that are chained to it. Lines of a message that are not indented belong to it if they
arrived together with its first line.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator

from unisono.cli.logs.log_lines import LogLine
from unisono.launcher.rank_logging import CONTINUED, read_head

LAST_LINES = 10
"""Lines of a process that died."""

LONGEST_MESSAGE = 50
"""Lines of a message."""

TRACEBACK = re.compile(r"(\s*\+ )?(Exception Group )?Traceback \(most recent call last\):")
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
STACK = re.compile(r"Fatal Python error: |.*\(most recent call first\):$")
"""What faulthandler prints when a process crashes."""

LEVEL = re.compile(
    r"(?:.{0,80}?[^\w'\"])?(?:ERROR|CRITICAL|FATAL)\b(?!['\"])"  # in capitals, near the beginning
    r"|(?:\[rank\d+\]:\s*)?[EF]\d{4} \d\d:"  # torch's form
    r"|(?:error|critical|fatal): "  # Unisono's own form
)
"""An error in another form than that of rank_logging.py."""


def is_error(text: str) -> bool:
    """Return whether a line is a record of level ERROR or above."""
    head = read_head(text)
    if head is not None:
        return head.level in ("ERROR", "CRITICAL")
    return LEVEL.match(text) is not None


class ErrorFilter:
    """Chooses the errors among the lines of one rank."""

    def __init__(self) -> None:
        self._part = ""  # of a traceback: frames, message, gap (a blank line); record, or error for another form
        self._message: LogLine | None = None  # the first line of the message
        self._length = 0  # of the message
        self._gap: LogLine | None = None
        self._recent = deque[tuple[LogLine, bool]](maxlen=LAST_LINES)  # and whether it was an error

    def add(self, line: LogLine) -> Iterator[LogLine]:
        """Yield what is chosen now that this line is known."""
        if line.end is not None:
            yield line
            for earlier, chosen in self._recent:
                if not chosen:
                    yield earlier._replace(order=line.order)
            self._recent.clear()
            self._part, self._gap = "", None
            return
        chosen = self._belongs(line)
        if chosen and self._gap is not None and self._gap is not line:
            yield self._gap
            self._gap = None
        if chosen and self._gap is None:
            yield line
        self._recent.append((line, chosen))

    def _belongs(self, line: LogLine) -> bool:
        """Return whether a line is a part of an error; a blank line may be, if another traceback follows."""
        text = line.text
        if self._part == "record" and text.startswith(CONTINUED):
            return True
        if TRACEBACK.match(text) or STACK.match(text):
            self._part = "frames" if TRACEBACK.match(text) else "error"
            return True
        if is_error(text):
            self._gap = None
            self._part = "record" if read_head(text) is not None else "error"
            return True
        if self._part in ("message", "error") and not text.strip():
            self._part, self._gap = "gap", line
            return True
        if self._part == "gap":
            if text.startswith(CHAINED):
                self._part = "chain"
                return True
            self._part, self._gap = "", None
            return False
        if self._part == "chain":
            return True
        return self._continues(line)

    def _continues(self, line: LogLine) -> bool:
        """Return whether a line continues the frames, the message or the record before it."""
        text = line.text
        indented = text[:1] in (" ", "\t", "|", "+")
        if self._part == "frames":
            if not indented:
                self._part, self._message, self._length = "message", line, 1
            return True
        if self._part == "message" and self._message is not None:
            self._length += 1
            together = line.time == self._message.time and self._length <= LONGEST_MESSAGE
            if indented or (together and read_head(text) is None):
                return True
        elif self._part == "error" and indented:
            return True
        self._part = ""
        return False
