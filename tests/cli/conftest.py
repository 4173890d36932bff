from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cli.command import Command
from tests.cli.refused_requests import request_problems as request_problems
from tests.standin import standin


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    """Return the command in an empty folder. Teardown waits until all of its processes have ended."""
    command = Command(tmp_path)
    yield command
    command.close()


@pytest.fixture
def device_type(accelerator: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the type of the only accelerator that commands find."""
    for name, value in standin.environment(accelerator).items():
        monkeypatch.setenv(name, value)
    found = torch.accelerator.current_accelerator()
    return "standin" if accelerator or found is None else found.type


@pytest.fixture(autouse=True, scope="session")
def signals_as_at_a_terminal() -> None:
    """Restore the default signal handlers.

    Tests that a script starts in the background (`make test &`, nohup) ignore these signals, and their child processes
    inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
