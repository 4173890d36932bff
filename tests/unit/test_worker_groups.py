"""The scheduler of our tests: a fixture is computed once, and a test that ends its worker is not repeated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

CONFTEST = """
from tests.worker_groups import ModulesTogether

def pytest_xdist_make_scheduler(config, log):
    return ModulesTogether(config, log)
"""

SHARED = """
import os, pathlib, pytest

@pytest.fixture(scope="module")
def shared():
    with open("computed", "a") as file:
        file.write("x")

@pytest.mark.parametrize("number", range(12))
def test_number(shared, number):
    if number == 5:
        with open("crashed", "a") as file:
            file.write("x")
        os._exit(1)
"""


def test_a_module_stays_on_a_worker_and_a_crash_is_not_repeated(tmp_path: Path) -> None:
    tmp_path.joinpath("conftest.py").write_text(CONFTEST)
    tmp_path.joinpath("test_shared.py").write_text(SHARED)
    tmp_path.joinpath("test_single.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    words = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadscope", "-p", "xdist.plugin"]
    environment = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert "1 failed, 13 passed" in ended.stdout, ended.stdout + ended.stderr
    assert tmp_path.joinpath("crashed").read_text() == "x"
    assert tmp_path.joinpath("computed").read_text() == "xx"  # once more after the crash
