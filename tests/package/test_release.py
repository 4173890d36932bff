"""`tools/release.py` in repositories made here: what prevents a release, and what a release is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.release import finish, git, notes_of, problems, repository

CHANGELOG = """# Changelog

## [Unreleased]

## [1.2.0] - 2026-11-30

#### Added

- A thing.

## [1.1.0] - 2026-01-01

- Old.
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a repository with a changelog, in which everything is committed."""
    git("init", "--quiet", root=tmp_path)
    for key, value in (("user.name", "T"), ("user.email", "t@example.org"), ("commit.gpgsign", "false")):
        git("config", key, value, root=tmp_path)
    git("config", "tag.gpgsign", "false", root=tmp_path)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / ".gitignore").write_text("dist/\nbuild/\n")
    git("add", ".", root=tmp_path)
    git("commit", "--quiet", "-m", "Begin", root=tmp_path)
    return tmp_path


def test_a_release_that_can_be_made_has_no_problems(project: Path) -> None:
    assert problems("1.2.0", project) == []


def test_everything_that_prevents_a_release_is_named_at_once(project: Path) -> None:
    (project / "CHANGELOG.md").write_text(CHANGELOG.replace("[Unreleased]\n", "[Unreleased]\n\n- New.\n"))
    git("tag", "v1.2.dev0", root=project)
    assert problems("1.2.dev0", project) == [
        "1 files are not committed, CHANGELOG.md first. Commit or remove them.",
        "Version 1.2.dev0 is not of the form 1.2.3 or 1.2.3rc1. Set it in unisono/__init__.py.",
        "There is a tag v1.2.dev0. Set the next version in unisono/__init__.py.",
        "CHANGELOG.md has no section '## [1.2.dev0] - YYYY-MM-DD' with text. Rename [Unreleased] to it.",
        "CHANGELOG.md has changes under [Unreleased]. Move them to the section of the version.",
    ]


def test_notes_are_those_of_the_version() -> None:
    assert notes_of(CHANGELOG, "1.2.0") == "#### Added\n\n- A thing."
    assert notes_of(CHANGELOG, "1.1.0") == "- Old."
    assert notes_of(CHANGELOG, "1.3.0") is None
    assert notes_of(CHANGELOG, "Unreleased") is None
    assert notes_of("## [1.0.0] - 2026-01-01\n\n", "1.0.0") is None


def test_a_release_has_hashes_and_a_tag_with_the_notes(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, name in (
        ("dist", "unisono-1.2.0-py3-none-any.whl"),
        ("dist", "unisono-1.2.0.tar.gz"),
        ("build", "sbom.cdx.json"),
    ):
        (project / folder).mkdir(exist_ok=True)
        (project / folder / name).write_text(name)
    finish("1.2.0", dry_run=True, root=project)
    assert git("tag", "--list", root=project) == ""
    finish("1.2.0", dry_run=False, root=project)
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=project / "dist", check=True)
    assert len((project / "dist" / "SHA256SUMS").read_text().splitlines()) == 4
    assert git("cat-file", "-t", "v1.2.0", root=project) == "tag"
    assert git("tag", "--list", "--format=%(contents)", root=project) == "#### Added\n\n- A thing."
    assert problems("1.2.0", project) == ["There is a tag v1.2.0. Set the next version in unisono/__init__.py."]
    assert "git push REMOTE v1.2.0" in capsys.readouterr().out


def test_the_address_of_the_repository_is_set_in_one_place(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nurls = { Repository = "https://example.org/u" }\n')
    assert repository(tmp_path) == "https://example.org/u"
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    assert repository(tmp_path) is None
