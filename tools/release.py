"""Check that a release can be made; then write its notes, its bill of materials and its hashes, and tag it.

    python -m tools.release check      # before anything is built
    python -m tools.release finish     # after `make dist sbom`: --dry-run makes no tag

`make release` calls both. Nothing is pushed or uploaded: the last lines are the commands that do.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import unisono

ROOT = Path(__file__).resolve().parents[1]
FINAL = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
"""Versions that are released: https://packaging.python.org/en/latest/specifications/version-specifiers/"""

SECTION = re.compile(r"^## \[(?P<name>[^\]]+)\](?: - (?P<date>\S+))?\n(?P<text>.*?)(?=^## \[|\Z)", re.M | re.S)


def git(*words: str, root: Path = ROOT) -> str:
    """Return the output of a command of git. Raises CalledProcessError if it fails."""
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.rstrip()


def notes_of(changelog: str, version: str) -> str | None:
    """Return the text of a version in the changelog; None if it has no dated section with text."""
    for section in SECTION.finditer(changelog):
        if section["name"] == version and re.fullmatch(r"\d{4}-\d\d-\d\d", section["date"] or ""):
            return section["text"].strip() or None
    return None


def problems(version: str, root: Path = ROOT) -> list[str]:
    """Return what prevents a release of this version, one line each: what is wrong, and what to do."""
    found = []
    if changed := git("status", "--porcelain", root=root).splitlines():
        found.append(f"{len(changed)} files are not committed, {changed[0][3:]} first. Commit or remove them.")
    if not FINAL.fullmatch(version):
        found.append(f"Version {version} is not of the form 1.2.3 or 1.2.3rc1. Set it in unisono/__init__.py.")
    if git("tag", "--list", f"v{version}", root=root):
        found.append(f"There is a tag v{version}. Set the next version in unisono/__init__.py.")
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if notes_of(changelog, version) is None:
        found.append(f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD' with text. Rename [Unreleased] to it.")
    if any(section["name"] == "Unreleased" and section["text"].strip() for section in SECTION.finditer(changelog)):
        found.append("CHANGELOG.md has changes under [Unreleased]. Move them to the section of the version.")
    return found


def repository(root: Path = ROOT) -> str | None:
    """Return the address of the repository in pyproject.toml; None if none is set."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project.get("urls", {}).get("Repository")
    return None if address is None else str(address)


def write_files(version: str, root: Path = ROOT) -> list[Path]:
    """Write notes, bill of materials and SHA256SUMS beside the wheel and the sdist in dist/; return all files."""
    folder = root / "dist"
    packages = [folder / f"unisono-{version}-py3-none-any.whl", folder / f"unisono-{version}.tar.gz"]
    notes = folder / f"notes-{version}.md"
    text = notes_of((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    assert text is not None, "`problems` was not called"
    notes.write_text(f"{text}\n", encoding="utf-8")
    bill = folder / f"unisono-{version}.cdx.json"
    shutil.copyfile(root / "build" / "sbom.cdx.json", bill)
    files = [*packages, notes, bill]
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    return [*files, folder / "SHA256SUMS"]


def finish(version: str, *, dry_run: bool, root: Path = ROOT) -> None:
    """Write the files of a release and tag the commit; print what to type to publish it."""
    for path in write_files(version, root):
        print(f"{path.relative_to(root)}  {path.stat().st_size:,} bytes")
    if dry_run:
        print(f"Dry run: no tag v{version} was made.")
        return
    notes = root / "dist" / f"notes-{version}.md"
    git("tag", "--annotate", f"v{version}", "--cleanup=verbatim", "--file", str(notes), root=root)
    print(f"Tagged {git('rev-parse', '--short', 'HEAD', root=root)} as v{version}. Nothing was published. Next:")
    print(f"  git push REMOTE v{version}\n  .venv-dist/bin/twine upload dist/*.whl dist/*.tar.gz")


def main() -> None:
    """Run `check` or `finish`, as the command line says."""
    version = unisono.__version__
    if found := problems(version):
        sys.exit("\n".join([f"Version {version} cannot be released:", *(f"  {problem}" for problem in found)]))
    if repository() is None:
        print(
            "pyproject.toml has no project.urls.Repository: the README of the packages has no links.", file=sys.stderr
        )
    if sys.argv[1] == "finish":
        finish(version, dry_run="--dry-run" in sys.argv[2:])


if __name__ == "__main__":
    main()
