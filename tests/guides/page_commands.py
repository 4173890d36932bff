"""Commands, files and quoted output of the pages of docs/start and docs/guide.

    ```python title="train.py"      a file of the page
    ```sh                           commands; lines that end with a backslash continue
    ```console                      lines after "$ " are commands, and the other lines quote their output;
                                    "a$ " is the prompt of the host a

A block of sh that starts with a comment in its first column and `#!` or `#SBATCH` is a file, not a list of commands.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from tests.house.sources import ROOT

DOCS = ROOT / "docs"
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)(?P<words>[^\n]*)\n(?P<code>.*?)^(?P=indent)```", re.M | re.S)
ON_HOST = re.compile(r"#\s*on ([a-z])$")
PROMPT = re.compile(r"(?P<host>[a-z]?)\$ (?P<command>.*)")
TITLE = re.compile(r'title="([^"]+)"')
SCRIPT_LINE = re.compile(r"#!|#SBATCH")
UNNAMED = ("unisono ", "torchrun ", "python ")
"""A block without a language that starts with one of these has commands."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the words after it, its text, and its first line in the page."""

    language: str
    words: str
    text: str
    line: int


@dataclass(frozen=True)
class Command:
    """A command of a page.

    Attributes:
        page: the path of the page, from the root of the project.
        line: its line in the page.
        text: what is typed, without a comment at its end.
        quoted: the lines that the page shows below it, with "..." for lines that it leaves out.
        host: the host of the prompt; "" for the reader's own.
        block: the line of the block; commands of one block on several hosts run at the same time.
    """

    page: str
    line: int
    text: str
    quoted: tuple[str, ...] = ()
    host: str = ""
    block: int = 0

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Return the pages whose commands count, by their paths from the root of the project."""
    found = [path for folder in ("start", "guide") for path in sorted((DOCS / folder).rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found]


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(m["language"], m["words"].strip(), textwrap.dedent(m["code"]), text.count("\n", 0, m.start()) + 2)
        for m in FENCE.finditer(text)
    ]


def files(page: str) -> dict[str, str]:
    """Return the files of a page by their names: the blocks with a title."""
    return {title[1]: block.text for block in blocks(page) if (title := TITLE.search(block.words))}


def commands(page: str) -> list[Command]:
    """Return the commands of a page, in order."""
    found: list[Command] = []
    for block in blocks(page):
        if TITLE.search(block.words):
            continue
        is_unnamed = block.language in ("", "text") and block.text.startswith(UNNAMED)
        if block.language == "console":
            found += _typed(page, block)
        elif (block.language in ("sh", "bash") and not SCRIPT_LINE.match(block.text)) or is_unnamed:
            found += _listed(page, block)
    return found


def _typed(page: str, block: Block) -> Iterator[Command]:
    """Yield the commands of a block with prompts, each with the lines below it."""
    current: Command | None = None
    for number, line in enumerate(block.text.splitlines(), block.line):
        if prompt := PROMPT.fullmatch(line):
            if current is not None:
                yield current
            current = Command(page, number, uncommented(prompt["command"]), (), prompt["host"], block.line)
        elif current is not None and current.text.endswith("\\"):
            current = _with(current, text=f"{current.text}\n{uncommented(line)}")
        elif current is not None:
            current = _with(current, quoted=(*current.quoted, line))
    if current is not None:
        yield current


def _listed(page: str, block: Block) -> Iterator[Command]:
    """Yield the commands of a block without prompts. A comment such as `# on a` names the host."""
    current = ""
    for number, line in enumerate(block.text.splitlines(), block.line):
        words = uncommented(line)
        on = ON_HOST.search(line)
        current += words if not current else f"\n{words}"
        if current.endswith(("\\", "||", "&&")):
            continue
        if current.strip():
            yield Command(page, number - current.count("\n"), current, (), on[1] if on else "", block.line)
        current = ""


def _with(command: Command, *, text: str | None = None, quoted: tuple[str, ...] | None = None) -> Command:
    new_text = command.text if text is None else text
    new_quoted = command.quoted if quoted is None else quoted
    return Command(command.page, command.line, new_text, new_quoted, command.host, command.block)


def uncommented(line: str) -> str:
    """Return a line of a shell without the comment at its end, and without a comment that is all of it."""
    return re.sub(r"(?:^|\s+)#(?:\s[^'\"]*)?$", "", line).rstrip()
