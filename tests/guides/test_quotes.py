"""What a walk reads of a page, and which differences between a quote and an output count."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guides import page_commands
from tests.guides.page_commands import Command, commands, files
from tests.guides.quotes import Quotes, same_line

PAGE = """# A

```python title="train.py"
a = 1
```

```sh
one --a     # a comment
two \\
    --b '#c'
three       # on b
```

```console
$ four &
printed
...
a$ five  # why
b$ six
```

```sh
#SBATCH --nodes=2
```

```text
unisono seven
```
"""


def test_commands_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    monkeypatch.setattr(page_commands, "ROOT", tmp_path)
    assert files("page.md") == {"train.py": "a = 1\n"}
    assert commands("page.md") == [
        Command("page.md", 8, "one --a", block=8),
        Command("page.md", 9, "two \\\n    --b '#c'", block=8),
        Command("page.md", 11, "three", host="b", block=8),
        Command("page.md", 15, "four &", ("printed", "..."), block=15),
        Command("page.md", 18, "five", host="a", block=15),
        Command("page.md", 19, "six", host="b", block=15),
        Command("page.md", 27, "unisono seven", block=27),
    ]


@pytest.mark.parametrize(
    ("quoted", "real"),
    [
        ("result  40 steps, loss 2.2749, 51 samples/s", "result 40 steps, loss 2.2748, 7 samples/s"),
        ("Process 2 died of SIGKILL after 41 steps", "Process 2 died of SIGKILL after 7 steps"),
        ("sent 4.92 MB of gradients", "sent 4.9 kB of gradients"),
        ("runs/a-20261124-203325", "runs/a-20271124-203325"),
        ("Watch at http://127.0.0.1:41027/?token=4nD3", "Watch at http://127.0.0.1:1/?token=x"),
        ("the script ... of it", "the script /a/b.py, line 3 of it"),
    ],
)
def test_lines_that_are_the_same(quoted: str, real: str) -> None:
    assert same_line(quoted, real)


@pytest.mark.parametrize(
    ("quoted", "real"),
    [
        ("40 steps, loss 2.27", "40 steps, loss 2.37"),
        ("4 ranks (8 virtual)", "3 ranks (8 virtual)"),
        ("Process 2 died", "Process 1 died"),
        ("promise exact", "promise tolerance"),
        ("no figure", "no figure 3"),
    ],
)
def test_lines_that_differ(quoted: str, real: str) -> None:
    assert not same_line(quoted, real)


def test_fingerprints_are_equal_where_the_page_has_equal_ones() -> None:
    one, two, real, other = ("a" * 64, "b" * 64, "1" * 64, "2" * 64)
    quotes = Quotes()
    assert quotes.missing(["start", "...", f"fingerprint {one}"], f"start\nmore\nfingerprint {real}\n") is None
    assert quotes.missing([f"fingerprint {one}"], f"fingerprint {other}") == f"fingerprint {one}"
    assert quotes.missing([f"fingerprint {two}"], f"fingerprint {other}") is None
    assert quotes.missing([f"fingerprint {two}"], f"fingerprint {real}") == f"fingerprint {two}"


def test_quoted_lines_come_in_their_order() -> None:
    assert Quotes().missing(["first", "second"], "second\nfirst\n") == "second"
