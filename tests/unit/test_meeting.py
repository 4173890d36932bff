"""Which exchanges go with which placement, and which settings nobody would read."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from unisono.settings import Line, LocalSettings, ParallelSettings, ServerSettings, Settings
from unisono.settings.check import check

LINE = Line(("unisono", "run", "train.py"))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"exchange": "ddp", "parallel": ParallelSettings(tensor=2)},
            "exchange = ddp and parallel.tensor = 2: .*whole models.*exchange=tree.*parallel.tensor=1",
        ),
        (
            {"exchange": "allreduce", "parallel": ParallelSettings(shard=2)},
            "exchange = allreduce and parallel.shard = 2: .*layer by layer.*exchange=tree.*parallel.gather=step",
        ),
        (
            {"exchange": "wide", "parallel": ParallelSettings(pipeline=2)},
            "exchange = wide and parallel.pipeline = 2: .*different parameters.*exchange=tree",
        ),
        ({"local": LocalSettings(every=10)}, "local.every = 10: .*for exchange=local.*exchange=local.*local.every=50"),
        ({"server": ServerSettings(staleness=None)}, "server.staleness = none: .*for exchange=server"),
        ({"exchange": "local", "local": LocalSettings(every=0)}, "local.every = 0: .*at least 1.*local.every=1"),
        (
            {"exchange": "server", "server": ServerSettings(staleness=-1)},
            "server.staleness = -1: .*at least 0.*server.staleness=0",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_to_type(asked: dict[str, Any], words: str) -> None:
    problems = check(Settings(steps=1, **asked), 4, LINE)
    told = [f"{problem.asked}: {problem.true} {problem.do}" for problem in problems]
    assert any(re.search(words, line) for line in told), told


@pytest.mark.parametrize(
    ("exchange", "axis"),
    [
        *itertools.product(["tree", "allreduce", "ring"], ["tensor", "context", "pipeline"]),
        ("wide", "tensor"),
        ("wide", "context"),
    ],
)
def test_what_adds_up_parts_goes_with_parts(exchange: Any, axis: str) -> None:
    sizes: dict[str, Any] = {axis: 2}
    assert check(Settings(steps=1, exchange=exchange, parallel=ParallelSettings(**sizes)), 4, LINE) == []


def test_all_that_was_asked_and_does_not_fit_is_told_at_once() -> None:
    asked: dict[str, Any] = {"local": LocalSettings(every=10, sites=3), "server": ServerSettings(count=2)}
    assert len(check(Settings(steps=1, **asked), 2, LINE)) == 3
