"""Run random scripts under random layouts: a run with the promise "exact" has the bits of one process."""

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
PER_TEST = 50
"""Number of scripts of a slow test."""
MOST_INVALID = 5
"""Largest number of these scripts that may fail on one process, for instance because torch lacks an operator."""


@pytest.mark.ci
@pytest.mark.parametrize("seed", range(QUICK))
def test_exact_promise_is_kept(seed: int, tmp_path: Path) -> None:
    verdict = judge(seed, tmp_path)
    assert verdict.kind not in ("finding", "invalid"), f"{verdict}\n\n{verdict.script.text}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(QUICK, SLOW, PER_TEST))
def test_exact_promise_is_kept_by_many_scripts(first: int, tmp_path: Path) -> None:
    verdicts = list(judge_all(range(first, min(first + PER_TEST, SLOW)), tmp_path, KNOWN, processes=2))
    print(table(verdicts))
    findings = [verdict for verdict in verdicts if verdict.kind == "finding"]
    assert not findings, "\n\n".join(f"{verdict}\n\n{verdict.script.text}" for verdict in findings)
    invalid = [verdict for verdict in verdicts if verdict.kind == "invalid"]
    assert len(invalid) <= MOST_INVALID, "\n\n".join(map(str, invalid))


def test_seed_determines_the_script() -> None:
    """Scripts are reproducible, valid Python, different from each other, and short."""
    scripts = [draw(seed) for seed in range(100)]
    assert [draw(seed) for seed in range(100)] == scripts
    assert len({script.text for script in scripts}) == 100
    for script in scripts:
        ast.parse(script.text)
        assert 30 < len(script.text.splitlines()) < 160
    assert draw_trial(scripts[7], KNOWN) == draw_trial(scripts[7], KNOWN)


def test_traits_are_left_out() -> None:
    drawn = {trait for seed in range(200) for trait in draw(seed, KNOWN).traits}
    assert not drawn & set(KNOWN)
    assert {trait for trait in KNOWN if "in shards" not in trait} <= {
        trait for seed in range(1000) for trait in draw(seed, ()).traits
    }


def test_violation_is_detected(tmp_path: Path) -> None:
    """The comparison above can fail: this script is wrong on purpose."""
    seed = next(seed for seed in range(1000) if draw(seed).broken == "a counter of rounds")
    assert judge(seed, tmp_path).kind in ("unseen", "noticed", "refused", "lowered")
