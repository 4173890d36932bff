"""The tables of exchanges and of conflicts: every row is about settings that exist, and its advice helps."""

from __future__ import annotations

import itertools
import re
from typing import Any, get_args

import pytest

from unisono.config import CommandLine, Settings, flatten
from unisono.config.conflicts import CONFLICTS, Condition, Conflict, conflicts_among
from unisono.config.entries import library_settings
from unisono.config.exchange_registry import DIVIDING_AXES, EXCHANGES, ExchangeName
from unisono.config.value_types import choices_of
from unisono.exchange.choose import exchange_class

NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")

DEFAULTS = flatten(Settings())


def examples(condition: Condition) -> list[Any]:
    """Return values with which the condition holds."""
    values: list[Any] = [None, True, False, -1, 0, 1, 2, 3, 0.5, "fp16", *EXCHANGES]
    values += ["selective", "full", "bf16", "int8", "topk", "average", "nesterov", "ZBVZeroBubble", "layer", "none"]
    values += ["compiled", "tensorwise", "script"]
    values += ["plain", "tls", "nccl", "0.0.0.0", ["a"]]
    default = DEFAULTS[condition.name]
    return [v for v in values if (isinstance(v, type(default)) or default is None or v is None) and condition.holds(v)]


@pytest.mark.parametrize("row", CONFLICTS, ids=lambda row: f"{row.first.name}-{row.second.name}")
def test_each_change_that_is_proposed_ends_the_conflict(row: Conflict) -> None:
    conditions = [each for each in (row.first, row.second, row.only) if each is not None]
    assert {each.name for each in conditions} <= set(library_settings())
    found = 0
    for values in itertools.product(*(examples(each)[:3] for each in conditions)):
        settings = {**DEFAULTS, **{each.name: value for each, value in zip(conditions, values, strict=True)}}
        if not row.holds(settings):
            continue  # two conditions on one setting, with two values
        found += 1
        assert row in set(conflicts_among(settings))
        problem = row.problem(settings, CommandLine())
        assert "{" not in problem.error + problem.remedy
        for change in row.changes or (row.first.change, row.second.change):
            words = change.split(" --ranks")[0].split(" ")
            changed = {name: _value(name, value) for name, value in (word.split("=") for word in words)}
            assert not row.holds({**settings, **changed}), change
    assert found


def _value(name: str, text: str) -> Any:
    """Return a typed text as the value of a setting."""
    words: dict[str, Any] = {"[]": [], "none": None if DEFAULTS[name] is None else "none", "true": True, "false": False}
    return words[text] if text in words else (float(text) if NUMBER.fullmatch(text) else text)


def test_default_settings_have_no_conflict() -> None:
    assert list(conflicts_among({**DEFAULTS, "steps": 1})) == []


def test_a_setting_without_a_value_has_no_conflict() -> None:
    assert list(conflicts_among({})) == []
    assert list(conflicts_among({"parallel.tensor": 2, "audit_every": 3})) != []


def test_exchanges_have_classes_that_promise_and_settings_that_exist() -> None:
    assert set(EXCHANGES) == set(get_args(ExchangeName))
    for name, info in EXCHANGES.items():
        for target in filter(None, (info.target, info.compressed, info.after_death, info.work_stealing)):
            assert exchange_class(target).promise
        assert not info.loop or callable(exchange_class(info.loop))
        assert set(info.axes) <= set(DIVIDING_AXES)
        assert not info.has_section or hasattr(Settings(), name)


def test_limits_are_of_numbers_and_allow_the_defaults() -> None:
    for name, (_, info) in library_settings().items():
        limits = info.limits
        if limits is None:
            continue
        assert not choices_of(type(DEFAULTS[name]))
        assert DEFAULTS[name] is None or DEFAULTS[name] in limits
