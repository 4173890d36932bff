"""Compare a wheel and an sdist with the files of the repository, and print what is missing or too much.

    python -m tools.distributions dist

A wheel has all files of unisono/ and no others. An sdist has all files of the repository. No link of the README that
they show is relative, because it would lead nowhere.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ONLY_IN_GIT = {".gitignore"}
MADE_BY_SETUPTOOLS = re.compile(r"PKG-INFO|setup\.cfg|unisono\.egg-info/.*")
RELATIVE_LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)\s]+)\)")


def tracked_files(root: Path = ROOT) -> set[str]:
    """Return the files of the repository, as git lists them. Raises CalledProcessError outside of a repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True)
    return {name for name in listed.stdout.split("\0") if name and (root / name).exists()}


def wheel_problems(wheel: Path, tracked: set[str]) -> list[str]:
    """Return what is wrong with a wheel, one line each."""
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        (about,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        metadata = file.read(f"{about}/METADATA").decode()
    problems = _differences(
        wheel.name,
        {name for name in names if not name.startswith(f"{about}/")},
        {name for name in tracked if name.startswith("unisono/")},
    )
    if f"{about}/licenses/LICENSE" not in names:
        problems.append(f"{wheel.name} has no LICENSE.")
    return problems + _readme_problems(wheel.name, metadata)


def sdist_problems(sdist: Path, tracked: set[str]) -> list[str]:
    """Return what is wrong with an sdist, one line each."""
    with tarfile.open(sdist) as file:
        names = {member.name.partition("/")[2] for member in file.getmembers() if member.isfile()}
        about = file.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert about is not None
        metadata = about.read().decode()
    ours = {name for name in names if not MADE_BY_SETUPTOOLS.fullmatch(name)}
    return _differences(sdist.name, ours, tracked - ONLY_IN_GIT) + _readme_problems(sdist.name, metadata)


def _differences(archive: str, found: set[str], wanted: set[str]) -> list[str]:
    missing = [f"{archive} lacks {name}." for name in sorted(wanted - found)]
    return missing + [f"{archive} has {name}, which git does not have." for name in sorted(found - wanted)]


def _readme_problems(archive: str, metadata: str) -> list[str]:
    """Return a line for each relative link of the README in the metadata, and one if there is no README."""
    about = message_from_string(metadata)
    text = str(about.get_payload())
    if about["Description-Content-Type"] != "text/markdown" or not text.startswith("# Unisono"):
        return [f"{archive} shows no README."]
    return [f"The README of {archive} has the relative link {link}." for link in RELATIVE_LINK.findall(text)]


def main() -> None:
    """Check the wheel and the sdist in the folder that the command line names."""
    folder = Path(sys.argv[1])
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    tracked = tracked_files()
    problems = wheel_problems(wheel, tracked) + sdist_problems(sdist, tracked)
    if problems:
        sys.exit("\n".join(problems))
    print(f"{wheel} and {sdist} have the files of the repository.")


if __name__ == "__main__":
    main()
