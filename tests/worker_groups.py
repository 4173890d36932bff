"""Which tests pytest-xdist keeps on one worker: those of a module with a fixture of its own scope.

A worker computes such a fixture again whenever it starts with a module. With --dist worksteal, tests of a module are on
all workers, and each computes the fixture, some of them several times. (--dist loadgroup does not work with pytest 9.2,
which ignores the name that pytest-xdist 3.8 gives to a test.)
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]


class ModulesTogether(LoadScopeScheduling):
    """Send tests that share a fixture to one worker, the largest module first, and other tests to the next idle one."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return path if has_module_fixture(Path(self.config.rootpath, path)) else nodeid


@cache
def has_module_fixture(path: Path) -> bool:
    """Return whether a test module defines a fixture that all its tests share."""
    return 'scope="module"' in path.read_text(encoding="utf-8")
