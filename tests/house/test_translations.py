"""Translations stay in step: each page has its partner with the same blocks, code, figures and links.

A page is translated by meaning, paragraph by paragraph. Tests compare what must not differ: the kinds of blocks in
order, code apart from comments, the cells of tables, figures, inline code, and targets of links. A new page of a
folder in IN_STEP needs its partner at once.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.house.page_blocks import HEADING_ID, PageBlock, blocks_of_page
from tests.house.sources import ROOT
from tests.house.test_documentation import slug

IN_STEP = ("README.md", "docs/index.md", "docs/start", "docs/guide")  # pages and folders of pages
FOLDER = "docs/zh"
HAN = r"[\u4e00-\u9fff]"
WORD = re.compile(r"[A-Za-z]{2,}")


def pages_in_step() -> list[str]:
    """Return the pages that need a partner, by their paths from the root of the project."""
    named = [ROOT / name for name in IN_STEP]
    found = [path for name in named for path in (sorted(name.rglob("*.md")) if name.is_dir() else [name])]
    return [path.relative_to(ROOT).as_posix() for path in found]


def partner_of(page: str) -> str:
    """Return the path of the translation: README.zh.md, or the same path in docs/zh as in docs."""
    return page.replace("docs/", f"{FOLDER}/", 1) if page.startswith("docs/") else page.replace(".md", ".zh.md")


PAGES = pages_in_step()
PARTNERS = {page: partner_of(page) for page in PAGES}


def read(page: str) -> list[PageBlock]:
    return blocks_of_page((ROOT / page).read_text(encoding="utf-8"))


def resolved(page: str, target: str) -> str:
    """Return a link as a path from the root of the project, with its anchor; other addresses stay."""
    if "://" in target or target.startswith("#"):
        return target
    path, mark, anchor = target.partition("#")
    return os.path.normpath(Path(page).parent / path) + mark + anchor


def wanted_link(page: str, target: str) -> str:
    """Return what a translation must link to: the partner, where there is one, and its original for its own partner."""
    path, mark, anchor = resolved(page, target).partition("#")
    back = {partner: original for original, partner in PARTNERS.items()}
    return PARTNERS.get(path, back.get(path, path)) + mark + anchor


def differences(page: str, partner: str, ours: list[PageBlock], theirs: list[PageBlock]) -> list[str]:
    """Compare the blocks of a page with those of its partner, and return what differs, with both places."""
    found: list[str] = []
    for one, other in zip(ours, theirs, strict=False):
        place = f"{partner}:{other.line} ({page}:{one.line})"
        if one.kind != other.kind:
            return [*found, f"{place}: {other.kind} in place of {one.kind}"]
        if one.is_code:
            if one.code_without_comments != other.code_without_comments:
                found.append(f"{place}: other code")
            continue
        links = sorted(wanted_link(page, link) for link in one.links), sorted(resolved(partner, n) for n in other.links)
        pairs = {"links": links, "inline code": (one.inline_code, other.inline_code)}
        pairs["figures"] = one.numbers, other.numbers
        for what, (wanted, got) in pairs.items():
            if wanted != got:
                found.append(f"{place}: {what} {got} in place of {wanted}")
    if len(ours) != len(theirs):
        found.append(f"{partner}: {len(theirs)} blocks in place of {len(ours)} of {page}")
    return found


def wrong_ids(partner: str, ours: list[PageBlock], theirs: list[PageBlock]) -> list[str]:
    """Return headings whose id is not the anchor of the original; README.zh.md is on no site and needs none."""
    return [
        f"{partner}:{other.line}: the heading ends with {{#{slug(one.text.lstrip('#'))}}}"
        for one, other in zip(ours, theirs, strict=False)
        if one.is_heading and one.kind != "heading 1" and partner.startswith(FOLDER)
        if HEADING_ID.findall(other.text) != [slug(one.text.lstrip("#"))]
    ]


def bad_style(block: PageBlock) -> list[str]:
    """Return rules of Chinese typography that a block of prose breaks."""
    text = re.sub(r"[*\[\]!]", "", block.prose.replace("``", "`x`"))
    rules = {
        "no Chinese": len(WORD.findall(block.prose)) > 6 and not re.search(HAN, text),
        "a line break, which a page shows as a space": "\n" in text,
        "no space between Chinese and Latin text": re.search(rf"{HAN}[A-Za-z0-9`]|[A-Za-z0-9`]{HAN}", text),
        "punctuation of Latin text": re.search(rf"{HAN}[,;:?!]|{HAN}\.(?:\s|$)|\([^()]*{HAN}[^()]*\)", text),
    }
    return [rule for rule, is_broken in rules.items() if is_broken]


def test_every_page_in_step_has_a_partner_and_no_partner_is_alone() -> None:
    partners = [path.relative_to(ROOT).as_posix() for path in [*(ROOT / FOLDER).rglob("*.md"), *ROOT.glob("*.zh.md")]]
    assert sorted(PARTNERS.values()) == sorted(partners)


@pytest.mark.parametrize("page", PAGES)
def test_partner_has_the_same_blocks_code_figures_and_links(page: str) -> None:
    partner = PARTNERS[page]
    ours, theirs = read(page), read(partner)
    assert differences(page, partner, ours, theirs) + wrong_ids(partner, ours, theirs) == []


@pytest.mark.parametrize("page", PAGES)
def test_partner_is_chinese_and_well_set(page: str) -> None:
    partner = PARTNERS[page]
    blocks = [block for block in read(partner) if not block.is_code]
    assert [f"{partner}:{b.line}: {rule}" for b in blocks for rule in bad_style(b)] == []


# -- the comparison itself

ENGLISH = """# Page

Two steps take 1.5 s with `clip`. See [start](start/install.md) and [promise](design/glossary.md#a).

| Word | Value |
|---|---|
| `a` | 3 |

## The idea

```python
x = 1  # one
```

- An item
"""
CHINESE = """# 页面

设置 `clip` 后，两步用时 1.5 s。见[安装](start/install.md)与[承诺](../design/glossary.md#a)。

| 词 | 值 |
|---|---|
| `a` | 3 |

## 思路 {#the-idea}

```python
x = 1  # 一
```

- 一项
"""


def compare(chinese: str) -> list[str]:
    """Compare a changed translation with the page above, as if both were in docs/."""
    page, partner = "docs/index.md", f"{FOLDER}/index.md"
    ours, theirs = blocks_of_page(ENGLISH), blocks_of_page(chinese)
    return differences(page, partner, ours, theirs) + wrong_ids(partner, ours, theirs)


def test_a_faithful_translation_has_no_differences() -> None:
    assert "docs/start/install.md" in PARTNERS
    assert "docs/design/glossary.md" not in PARTNERS
    assert compare(CHINESE) == []
    assert [rule for block in blocks_of_page(CHINESE) if not block.is_code for rule in bad_style(block)] == []


@pytest.mark.parametrize(
    ("old", "new", "place", "what"),
    [
        ("1.5", "1.6", "docs/zh/index.md:3 (docs/index.md:3)", "figures"),
        ("`clip`", "`batch`", "docs/zh/index.md:3 (docs/index.md:3)", "inline code"),
        ("start/install.md", "../start/install.md", "docs/zh/index.md:3 (docs/index.md:3)", "links"),
        ("../design/glossary.md#a", "../design/glossary.md", "docs/zh/index.md:3 (docs/index.md:3)", "links"),
        ("| `a` | 3 |", "| `a` | 3 | |", "docs/zh/index.md:7 (docs/index.md:7)", "row of 3 cells"),
        ("| `a` | 3 |\n", "", "docs/zh/index.md:8 (docs/index.md:7)", "heading 2"),
        ("## 思路", "### 思路", "docs/zh/index.md:9 (docs/index.md:9)", "heading 3"),
        (" {#the-idea}", "", "docs/zh/index.md:9", "{#the-idea}"),
        ("x = 1", "x = 2", "docs/zh/index.md:11 (docs/index.md:11)", "other code"),
        ("- 一项\n", "", "docs/zh/index.md", "7 blocks in place of 8"),
    ],
)
def test_a_difference_is_named_with_its_place(old: str, new: str, place: str, what: str) -> None:
    found = compare(CHINESE.replace(old, new))
    assert found
    assert found[0].startswith(f"{place}: ")
    assert what in found[0]


@pytest.mark.parametrize(
    "text",
    [
        "This whole sentence is not translated at all",
        "一行\n又一行",
        "梯度gradient",
        "设置`clip`",
        "梯度, 优化器",
        "梯度 (gradient 的中文)",
    ],
)
def test_bad_style_is_found(text: str) -> None:
    (block,) = blocks_of_page(text)
    assert len(bad_style(block)) == 1
