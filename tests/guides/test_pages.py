"""Every command of the Start and Guide pages is typed here, or is listed with the reason why not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.guides.machines import follow, missing_for
from tests.guides.not_run import NOT_RUN, key_of, why_not
from tests.guides.page_commands import commands, pages
from tests.guides.page_needs import LATER, SLOW, SMALLER, STATUS, UNQUOTED
from tests.guides.walk import runnable

COMPARED = re.compile(r"\b(?:before|after)\.py(?: --ranks 2)?$")
"""Commands that train the same model: a script for another library, and what it is converted into."""
WALKED = [page for page in pages() if runnable(page)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow if page in SLOW else pytest.mark.ci) for page in WALKED]
)
def test_a_page_can_be_followed(page: str, tmp_path: Path) -> None:
    """Type its commands in a new folder; what they print has the lines that the page quotes."""
    if reason := missing_for(page):
        pytest.skip(reason)
    found = follow(page, tmp_path)
    assert found.problems == [], "\n\n".join(found.problems)
    losses = [last_number(each.output) for each in found.typed if COMPARED.search(each.command.text)]
    assert all(loss == pytest.approx(losses[0], rel=1e-6) for loss in losses), losses
    if found.left_out:
        pytest.skip(f"{len(found.left_out)} of {len(runnable(page))} commands: {'; '.join(found.left_out)}")


def last_number(output: str) -> float:
    """Return the last loss that a script prints."""
    return float(re.findall(r"^\w+ loss (\d+\.\d{6,})$", output, re.M)[-1])


def test_every_command_is_typed_or_has_a_reason() -> None:
    """The tables name commands that exist, and a reason is a sentence."""
    known = [command for page in pages() for command in commands(page)]
    assert len(known) > 150
    used = {key_of(command) for command in known}
    assert sorted(set(NOT_RUN) - used) == [], "entries of NOT_RUN without a command"
    texts = {(command.page, command.text) for command in known if why_not(command) is None}
    assert [key for table in (LATER, STATUS, UNQUOTED) for key in table if key not in texts] == []
    parts = [(page, long) for page, changes in SMALLER.items() for long, _ in changes]
    assert [part for part in parts if not any(part[0] == page and part[1] in text for page, text in texts)] == []
    assert [page for page in SLOW if page not in WALKED] == []
    assert all(len(reason.split()) > 2 for reason in (*NOT_RUN.values(), *UNQUOTED.values()))
