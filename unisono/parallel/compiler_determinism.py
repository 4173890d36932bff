"""Compilers that would compute other bits depending on what a process has compiled or measured before.

    torch.jit.script    the profiling executor specializes a graph after its first calls: other bits from the second or
                        third call on, counted in each process. Without it: the bits of eager torch from the first call
    torch.compile       a second shape makes a frame dynamic, and its kernels depend on the order of shapes; from the
                        ninth variant on a frame is not compiled at all. Now each shape has code of its own, and too
                        many of them are an error
    inductor            chooses kernels by measuring (mode="max-autotune"): now without measuring

The settings are made when a run is made, or when torch first imports the compiler: importing it takes a second.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

import torch

from unisono import phases
from unisono.errors import LoopError

VARIANTS = 64
"""So many variants (shapes; training, evaluation) of one frame are compiled; torch's 8 would go on without a word,
uncompiled, with other bits."""

order_dependent: list[str] = []
"""Why code that was compiled in this process may depend on what it has compiled before, in words."""

DYNAMIC = "torch.compile(dynamic=True) makes code that depends on the first shape a process meets"


def fix_compilers() -> None:
    """From now on, compiled code computes the same bits whatever a process has seen before. (What torch.jit.script has
    specialized already stays so.)"""
    torch._C._jit_set_profiling_mode(False)
    _when_imported("torch._dynamo.config", _fix_dynamo)
    _when_imported("torch._inductor.config", _fix_inductor)
    _when_imported("torch._dynamo.callback", _listen)


def _fix_dynamo(config: Any) -> None:
    config.automatic_dynamic_shapes = False
    config.recompile_limit = VARIANTS
    config.fail_on_recompile_limit_hit = True


def _fix_inductor(config: Any) -> None:
    config.deterministic = True


def _listen(callback: Any) -> None:
    """Know when the main thread compiles: that is progress, however long it takes."""
    handler = callback.callback_handler
    if _begins not in handler.start_callbacks:
        handler.register_start_callback(_begins)
        handler.register_end_callback(_ends)


def _begins(_: Any) -> None:
    phases.Position.compiles += 1
    phases.Position.moves += 1
    config = sys.modules["torch._dynamo.config"]
    if config.automatic_dynamic_shapes and DYNAMIC not in order_dependent:
        order_dependent.append(DYNAMIC)


def _ends(_: Any) -> None:
    phases.Position.compiles = max(phases.Position.compiles - 1, 0)
    phases.Position.moves += 1


@contextmanager
def limits_named() -> Iterator[None]:
    """Where a frame has too many variants, raise LoopError instead of torch's own error."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "FailOnRecompileLimitHit":
            raise
        raise LoopError(
            "torch.compile was to compile a function for another shape.",
            f"There are {VARIANTS} variants of it already, one for each shape of its inputs.",
            "pad batches to a few lengths; or torch.compile(dynamic=True), for which no bits are promised.",
        ) from error


# -- when a module is imported


class _CompilerFinder(MetaPathFinder):
    """Calls what waits for a module right after it was imported."""

    def __init__(self) -> None:
        self.waiting: dict[str, Callable[[Any], None]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.waiting:
            return None
        then = self.waiting.pop(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def loaded(module: ModuleType) -> None:
            load(module)
            then(sys.modules.get(name, module))

        spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


_importing = _CompilerFinder()


def _when_imported(name: str, then: Callable[[Any], None]) -> None:
    if name in sys.modules:
        then(sys.modules[name])
        return
    _importing.waiting[name] = then
    if _importing not in sys.meta_path:
        sys.meta_path.insert(0, _importing)
