"""Random scripts on random placements: what says exact has the bits of one process, and what is refused says why."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.scripts.__main__ import judge_all, table
from tests.scripts.generator import draw
from tests.scripts.known import KNOWN
from tests.scripts.placements import draw_trial
from tests.scripts.verdict import judge

QUICK = 30
SLOW = 2000
TOGETHER = 50
"""Scripts of one slow test."""
MOST_INVALID = 5
"""Of these, scripts that fail by themselves on one process: an operator that torch lacks for a type, say."""


@pytest.mark.parametrize("seed", range(QUICK))
def test_what_says_exact_is(seed: int, tmp_path: Path) -> None:
    verdict = judge(seed, tmp_path)
    assert verdict.kind not in ("finding", "invalid"), f"{verdict}\n\n{verdict.script.text}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(QUICK, SLOW, TOGETHER))
def test_what_says_exact_is_for_many(first: int, tmp_path: Path) -> None:
    verdicts = list(judge_all(range(first, min(first + TOGETHER, SLOW)), tmp_path, KNOWN, processes=2))
    print(table(verdicts))
    found = [verdict for verdict in verdicts if verdict.kind == "finding"]
    assert not found, "\n\n".join(f"{verdict}\n\n{verdict.script.text}" for verdict in found)
    invalid = [verdict for verdict in verdicts if verdict.kind == "invalid"]
    assert len(invalid) <= MOST_INVALID, "\n\n".join(map(str, invalid))


def test_a_seed_is_a_script() -> None:
    """The same text every time, Python, and of a length that one reads; no two alike."""
    scripts = [draw(seed) for seed in range(100)]
    assert [draw(seed) for seed in range(100)] == scripts
    assert len({script.text for script in scripts}) == 100
    for script in scripts:
        ast.parse(script.text)
        assert 30 < len(script.text.splitlines()) < 160
    assert draw_trial(scripts[7], KNOWN) == draw_trial(scripts[7], KNOWN)


def test_what_is_left_out_is_not_drawn() -> None:
    drawn = {trait for seed in range(200) for trait in draw(seed, KNOWN).traits}
    assert not drawn & set(KNOWN)
    assert {trait for trait in KNOWN if "in shards" not in trait} <= {
        trait for seed in range(1000) for trait in draw(seed, ()).traits
    }


def test_a_difference_is_found(tmp_path: Path) -> None:
    """A script that is wrong on purpose, so that the comparison above can fail."""
    seed = next(seed for seed in range(1000) if draw(seed).broken == "a counter of rounds")
    assert judge(seed, tmp_path).kind in ("unseen", "noticed", "refused", "lowered")
