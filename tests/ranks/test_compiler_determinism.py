"""Compiled code computes the same bits whatever a process has compiled before."""

from __future__ import annotations

import importlib.machinery
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.loops import SETTINGS, Numbers, attempt, train
from unisono import phases
from unisono.config.schema import WatchdogSettings
from unisono.environment import World
from unisono.errors import LoopError
from unisono.monitor.status_thread import COMPILE_TIMES, StatusThread
from unisono.parallel import compiler_determinism
from unisono.testing import run_ranks
from unisono.train import run as run_module


def swish(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


class Scripted(nn.Module):
    def __init__(self, *, traced: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 37), nn.Linear(37, 2)
        self.swish = torch.jit.trace(swish, (torch.randn(2, 3),)) if traced else torch.jit.script(swish)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.swish(self.up(x)))
        return out


def scripted(world: World, folder: str, fixed: bool, traced: bool) -> Any:
    torch._C._jit_set_profiling_mode(True)
    if not fixed:
        run_module.fix_compilers = lambda: None
    loop = partial(train, data=Numbers(23), build=partial(Scripted, traced=traced))
    return attempt(world, Path(folder), loop, replace(SETTINGS, steps=5))


@pytest.mark.parametrize("traced", [False, True])
def test_torchscript_has_the_same_bits_from_the_first_call_on(tmp_path: Path, traced: bool) -> None:
    told = [each for n in (1, 2, 3) for each in run_ranks(scripted, n, str(tmp_path / str(n)), True, traced)]
    assert isinstance(told[0], list), told[0]
    assert all(other == told[0] for other in told)


def test_without_the_setting_bits_differ(tmp_path: Path) -> None:
    one, three = (run_ranks(scripted, n, str(tmp_path / str(n)), False, False)[0] for n in (1, 3))
    assert one != three


SETS = """
import sys
import torch
from unisono.parallel.compiler_determinism import fix_compilers
fix_compilers()
assert "torch._dynamo" not in sys.modules
import torch._dynamo.config as dynamo, torch._inductor.config as inductor
from torch._dynamo.callback import callback_handler
print(dynamo.automatic_dynamic_shapes, dynamo.fail_on_recompile_limit_hit, inductor.deterministic)
print(len(callback_handler.start_callbacks))
"""


@pytest.mark.slow
def test_a_compiler_that_is_imported_later_is_configured() -> None:
    ended = subprocess.run([sys.executable, "-c", SETS], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["False", "True", "True", "1"]


def test_a_function_that_waits_for_a_module_is_called_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[Any] = []
    compiler_determinism._when_imported("imported_later", seen.append)
    import imported_later  # type: ignore[import-not-found]

    assert seen == [imported_later]
    assert isinstance(imported_later.__spec__, importlib.machinery.ModuleSpec)
    compiler_determinism._when_imported("imported_later", seen.append)
    assert len(seen) == 2


def test_too_many_variants_raise_a_helpful_error() -> None:
    error = type("FailOnRecompileLimitHit", (Exception,), {})
    with pytest.raises(LoopError, match="pad batches to a few lengths"), compiler_determinism.name_recompile_limit():
        raise error("recompile_limit reached")


def test_the_watchdog_waits_longer_while_a_process_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases.position, "steps", 5)
    watch = StatusThread(WatchdogSettings(timeout=10.0), World())
    assert watch._limit == 10.0
    config = SimpleNamespace(automatic_dynamic_shapes=False)
    monkeypatch.setitem(sys.modules, "torch._dynamo.config", config)
    compiler_determinism._on_start(None)
    try:
        assert watch._limit == 10.0 * COMPILE_TIMES
        assert watch._current().phase == "compile"
    finally:
        compiler_determinism._on_end(None)
    assert watch._limit == 10.0
