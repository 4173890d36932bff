"""Configure all tests: caches are in a temporary folder, and hypothesis has no deadline.

Bytecode is cached as usual. Without it, each process that a test starts would compile the library (0.3 s), and each
pytest worker would compile all tests (5 s).
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from multiprocessing.forkserver import ensure_running
from typing import Any

import hypothesis
import pytest

hypothesis.settings.register_profile("unisono", deadline=None)  # the machine may be busy
hypothesis.settings.load_profile("unisono")

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

_cache = tempfile.mkdtemp(prefix="unisono-cache-")
os.environ["XDG_CACHE_HOME"] = _cache  # before the fork server starts, whose children inherit it

for _number in (signal.SIGINT, signal.SIGHUP):  # ignored in the background of a shell, and so by what tests start
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep tests that share a fixture on one worker (--dist loadscope)."""
    from tests.worker_groups import ModulesTogether

    return ModulesTogether(config, log) if config.getvalue("dist") == "loadscope" else None


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(_cache, ignore_errors=True)


@pytest.fixture(scope="session")
def accelerator(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Build the library of a simulated accelerator (tests/standin); "" on a machine with a real one.

    This also starts the fork server of the pytest worker. If it started while a test had set the environment variables
    of the stand-in, the processes of all later tests would have the stand-in.
    """
    import torch

    import unisono.testing  # noqa: F401  names the modules that the fork server imports
    from tests.standin import standin

    ensure_running()

    if torch.accelerator.is_available():
        return ""
    if reason := standin.missing():
        pytest.skip(reason)
    return str(standin.build(tmp_path_factory.getbasetemp().parent))
