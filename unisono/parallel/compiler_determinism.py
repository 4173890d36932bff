"""Make compilers compute bits that do not depend on what a process has compiled or measured before.

    torch.jit.script    the profiling executor specializes a graph after its first calls: other bits from the second or
                        third call on, counted in each process. Without it: the bits of eager torch from the first call
    torch.compile       a second shape makes a frame dynamic, and its kernels depend on the order of shapes; from the
                        ninth variant on a frame is not compiled at all. Here each shape has code of its own, and too
                        many of them are an error
    inductor            chooses kernels by measuring (mode="max-autotune"); here it does not measure

torch's configuration is changed when a run is built, or when torch first imports the compiler, which takes a second.
"""

from __future__ import annotations

import importlib.machinery
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from unisono import environment, phases
from unisono.errors import LoopError
from unisono.torch_compat.modules import disable_jit_profiling

VARIANTS = 64
"""The most variants (shapes; training, evaluation) of one frame that are compiled. After torch's default of 8 it would
continue uncompiled, with other bits and without a message."""

order_dependent: list[str] = []
"""Why code that was compiled in this process may depend on what it has compiled before."""

DYNAMIC = "torch.compile(dynamic=True) makes code that depends on the first shape a process meets"


def fix_compilers() -> None:
    """Make compiled code independent of what a process has seen before.

    What torch.jit.script has specialized already stays as it is.
    """
    disable_jit_profiling()
    _when_imported("torch._dynamo.config", _fix_dynamo)
    _when_imported("torch._inductor.config", _fix_inductor)
    _when_imported("torch._dynamo.callback", _register_callbacks)


def _fix_dynamo(config: Any) -> None:
    config.automatic_dynamic_shapes = False
    config.recompile_limit = VARIANTS
    config.fail_on_recompile_limit_hit = True


def _fix_inductor(config: Any) -> None:
    config.deterministic = True


def _register_callbacks(callback: Any) -> None:
    """Count compilations of the main thread as progress, however long they take."""
    handler = callback.callback_handler
    if _on_start not in handler.start_callbacks:
        handler.register_start_callback(_on_start)
        handler.register_end_callback(_on_end)


def _on_start(_: Any) -> None:
    phases.position.compiles += 1
    phases.position.moves += 1
    config = sys.modules["torch._dynamo.config"]
    if config.automatic_dynamic_shapes and DYNAMIC not in order_dependent:
        order_dependent.append(DYNAMIC)


def _on_end(_: Any) -> None:
    phases.position.compiles = max(phases.position.compiles - 1, 0)
    phases.position.moves += 1


@contextmanager
def name_recompile_limit() -> Iterator[None]:
    """Raise LoopError instead of torch's own error where a frame has too many variants."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "FailOnRecompileLimitHit":
            raise
        raise LoopError(
            "A function met too many shapes for torch.compile.",
            f"There are {VARIANTS} variants of it already, one for each shape of its inputs.",
            "pad batches to a few lengths; or torch.compile(dynamic=True), for which no bits are promised.",
        ) from error


def cpp_compiler() -> str:
    """Return the compiler that torch.compile uses for the CPU, with its version: "g++ 12.2.0"."""
    known = (*environment.variables(("CXX",)).values(), "g++", "clang++")
    name = next(filter(shutil.which, known), None)
    if name is None:
        return "no C++ compiler"
    ended = subprocess.run([name, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, check=False)
    return f"{Path(name).name} {ended.stdout.strip()}"


# -- call a function when a module is imported


class _CompilerFinder(MetaPathFinder):
    """Call functions right after the modules that they wait for were imported."""

    def __init__(self) -> None:
        self.waiting: dict[str, Callable[[Any], None]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.waiting:
            return None
        call = self.waiting.pop(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_call(module: ModuleType) -> None:
            load(module)
            call(sys.modules.get(name, module))

        spec.loader.exec_module = load_and_call  # type: ignore[method-assign]
        return spec


_finder = _CompilerFinder()


def _when_imported(name: str, call: Callable[[Any], None]) -> None:
    if name in sys.modules:
        call(sys.modules[name])
        return
    _finder.waiting[name] = call
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
