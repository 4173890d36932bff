from __future__ import annotations

from tests.cli.conftest import command as command
