"""For all tests: what is kept for next time goes to a folder that goes, and no example of a property is too slow.

But for bytecode, which stays where Python puts it: each of the many processes that the tests start would compile the
library anew (0.3 s), and every worker of pytest all tests (5 s).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from multiprocessing.forkserver import ensure_running

import hypothesis
import pytest

hypothesis.settings.register_profile("unisono", deadline=None)  # a test says what is true, not how busy this machine is
hypothesis.settings.load_profile("unisono")

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

_cache = tempfile.mkdtemp(prefix="unisono-cache-")
os.environ["XDG_CACHE_HOME"] = _cache  # before the fork server starts, whose children inherit it


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(_cache, ignore_errors=True)


@pytest.fixture(scope="session")
def accelerator(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The library of an accelerator that there is not (tests/standin); "" on a machine that has one.

    The fork server of this worker starts here at the latest: one that starts while a test has set the variables of the
    stand-in would give the stand-in to the processes of all later tests.
    """
    import torch

    import unisono.testing  # noqa: F401  names the modules that the fork server imports
    from tests.standin import standin

    ensure_running()

    if torch.accelerator.is_available():
        return ""
    if why := standin.missing():
        pytest.skip(why)
    return str(standin.build(tmp_path_factory.getbasetemp().parent))
