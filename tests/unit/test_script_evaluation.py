"""Which modules an export searches for a call of `run.evaluate`."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest

from tests.house.sources import ROOT
from unisono.export import script_evaluation
from unisono.recipes import topics


@pytest.mark.parametrize(
    ("module", "evaluates"), [(topics, True), (script_evaluation, False)], ids=["recipe", "library"]
)
@pytest.mark.parametrize("installed", ["/nowhere", str(ROOT)], ids=["in-a-clone", "from-a-wheel"])
def test_recipes_are_searched_wherever_the_library_is(
    module: ModuleType, evaluates: bool, installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_evaluation, "sysconfig", SimpleNamespace(get_path=lambda name: installed))
    monkeypatch.setattr(script_evaluation, "sys", SimpleNamespace(modules={"it": module}))
    assert script_evaluation.script_evaluates() == evaluates
