"""A new user installs the wheel, converts a script, kills and resumes a run, and looks at its page: in ten minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guides.new_user import NewUser, walk, wheel_of_sources
from tests.package.builds import environment_with, tracked_or_skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_from_a_wheel_to_a_resumed_run_and_its_report(tmp_path: Path) -> None:
    pytest.importorskip("libcst", reason="needs libcst: pip install 'unisono[convert]'")
    tracked_or_skip()
    wheel = wheel_of_sources(tmp_path)
    (tmp_path / "work").mkdir()
    walk(NewUser(tmp_path / "work", environment_with(tmp_path / "environment", wheel)))
