from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.asking import ask as ask
from tests.cli.command import Command


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    """The command in an empty folder. After the test no process of it is left, or the test hangs and says so."""
    command = Command(tmp_path)
    yield command
    command.close()


@pytest.fixture(autouse=True, scope="session")
def signals_as_at_a_terminal() -> None:
    """Whoever starts the tests in the background of a script (`make test &`, nohup) has these ignored, and what we
    start would inherit that, and rightly take no Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
