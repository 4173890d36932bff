"""Which tests pytest-xdist keeps on one worker: those of a module with a fixture of its own scope.

A worker computes such a fixture again whenever it starts with a module. With --dist worksteal, tests of a module are on
all workers, and each computes the fixture, some of them several times. (--dist loadgroup does not work with pytest 9.2,
which ignores the name that pytest-xdist 3.8 gives to a test.)
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]


class ModulesTogether(LoadScopeScheduling):
    """Send tests that share a fixture to one worker, the largest module first, and other tests to the next idle one."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return path if has_module_fixture(Path(self.config.rootpath, path)) else nodeid

    def remove_node(self, node: Any) -> str | None:
        """Remove a worker that has ended, and return the test that it ran.

        A test that has crashed a worker is not repeated. The scheduler of pytest-xdist sends it to the next one.
        """
        work = self.assigned_work.pop(node)
        crashed = next((test for tests in work.values() for test, done in tests.items() if not done), None)
        for scope, tests in work.items():
            left = {test: done or test == crashed for test, done in tests.items()}
            if not all(left.values()):
                self.workqueue[scope] = left
        if crashed is not None:
            for other in self.assigned_work:
                self._reschedule(other)
        return crashed


@cache
def has_module_fixture(path: Path) -> bool:
    """Return whether the tests of a module share a fixture, of the module or of the conftest.py of its folder."""
    files = [path, path.with_name("conftest.py")]
    return any('scope="module"' in file.read_text(encoding="utf-8") for file in files if file.is_file())
