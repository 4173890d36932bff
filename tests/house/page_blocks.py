"""Markdown pages as blocks: headings, fences, table rows, list items and paragraphs, with the facts in each."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

FENCE = re.compile(r" *(?:```|~~~)(\w*)")
ITEM = re.compile(r" *(?:[-*]|\d+\.) +")
LINK = re.compile(r"\]\(([^)\s]+)[^)]*\)")
INLINE_CODE = re.compile(r"(`+)(.+?)\1", re.S)
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
HEADING_ID = re.compile(r" *\{#([\w-]+)\}$")
COMMENTS = {
    "python": r"(?:^|[ \t]+)#[^\n]*",
    "py": r"(?:^|[ \t]+)#[^\n]*",
    "sh": r"(?:^|[ \t]+)#[^\n]*",
    "toml": r"(?:^|[ \t]+)#[^\n]*",
    "yaml": r"(?:^|[ \t]+)#[^\n]*",
}


@dataclass(frozen=True)
class PageBlock:
    """A block of a page: `kind` says what it is and how deep or wide, `line` is its first line, from 1."""

    kind: str
    line: int
    text: str

    @property
    def is_code(self) -> bool:
        return self.kind.startswith("code")

    @property
    def is_heading(self) -> bool:
        return self.kind.startswith("heading")

    @property
    def prose(self) -> str:
        """The text without inline code and link targets; a heading without its id."""
        return LINK.sub("]", INLINE_CODE.sub("``", HEADING_ID.sub("", self.text)))

    @property
    def links(self) -> list[str]:
        """The targets of links and images, in the order of the text."""
        return LINK.findall(INLINE_CODE.sub("``", self.text))

    @property
    def inline_code(self) -> set[str]:
        return {" ".join(code.split()) for _, code in INLINE_CODE.findall(self.text)}

    @property
    def numbers(self) -> Counter[str]:
        """The figures of the prose, each as often as it occurs."""
        return Counter(NUMBER.findall(self.prose))

    @property
    def code_without_comments(self) -> str:
        """The lines of a fence without comments, for languages that have any."""
        comment = COMMENTS.get(self.kind.removeprefix("code "))
        return re.sub(comment, "", self.text, flags=re.M) if comment else self.text


def kind_of(line: str) -> str:
    """Return the kind of the block that this line starts."""
    if heading := re.match(r"#+(?= )", line):
        return f"heading {len(heading[0])}"
    if line.startswith("|"):
        cells = INLINE_CODE.sub("``", line).strip().strip("|").split("|")
        return f"row of {len(cells)} cells"
    if item := ITEM.match(line):
        return "numbered item" if item[0].strip()[0].isdigit() else "item"
    return "paragraph"


def blocks_of_page(text: str) -> list[PageBlock]:
    """Divide the text of a page into its blocks, in order."""
    blocks: list[PageBlock] = []
    fence: str | None = None
    is_open = False  # whether the next line may continue the last block
    for number, line in enumerate(text.splitlines(), 1):
        if fence is not None:
            if line.strip() == fence:
                fence, is_open = None, False
            else:
                last = blocks[-1]
                blocks[-1] = PageBlock(last.kind, last.line, f"{last.text}{line.strip() and line}\n")
        elif found := FENCE.match(line):
            fence = line.strip()[:3]
            blocks.append(PageBlock(f"code {found[1]}", number, ""))
        elif not line.strip():
            is_open = False
        elif is_open and kind_of(line) == "paragraph":
            blocks[-1] = PageBlock(blocks[-1].kind, blocks[-1].line, f"{blocks[-1].text}\n{line}")
        else:
            blocks.append(PageBlock(kind_of(line), number, line))
            is_open = not line.startswith(("#", "|"))
    return blocks
