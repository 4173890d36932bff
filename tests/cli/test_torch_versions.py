"""A torch that is too old is named in one message, before anything of it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import ROOT
from unisono.environment import inherited
from unisono.torch_compat.versions import OLDEST, require_torch


def test_the_oldest_version_is_that_of_the_package() -> None:
    assert f'"torch>={OLDEST[0]}.{OLDEST[1]}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    require_torch()


@pytest.mark.parametrize("version", ["2.9.1", "1.13.1+cu117"])
def test_an_old_torch_is_refused(tmp_path: Path, version: str) -> None:
    """The metadata of an old torch come first on the path of this process."""
    about = tmp_path / f"torch-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    ended = subprocess.run(
        [sys.executable, "-c", "import unisono\nunisono.main(print)"],
        env=inherited({"PYTHONPATH": f"{tmp_path}:{ROOT}"}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith(
        f"torch {version} is too old.\n  Unisono needs torch 2.10 or newer.\n  Next: pip install 'torch>=2.10'\n"
    )


def test_a_new_torch_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in ("2.10.0", "2.13.0+cpu", "3.0.0a0+git1234", "2.11.0+cu130"):
        monkeypatch.setattr("unisono.torch_compat.versions.version", lambda name, found=found: found)
        require_torch()
