from __future__ import annotations

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
