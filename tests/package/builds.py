"""Packages of the project, built without a network, and new environments that have them.

An environment has this one's other packages, torch among them, through a .pth file: nothing is downloaded. Such a file
names folders and does not run what is in them, so an editable install of the project that is there has no effect.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.house.sources import ROOT
from tools.distributions import tracked_files
from unisono.environment import inherited

OLDEST_SETUPTOOLS = 77
HOOK = "import sys, setuptools.build_meta as back_end; getattr(back_end, sys.argv[1])(sys.argv[2])"


def run(*command: str | Path, folder: Path, status: int = 0) -> str:
    """Run a command in a folder, with no path to this project; return its output. Fail if it has another status."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=inherited({"PYTHONPATH": ""}),
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked_or_skip() -> set[str]:
    """Return the files of the repository. Skip the test where it is no repository, such as in an unpacked sdist."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no repository of git: its files are not known")
    for package, oldest in (("setuptools", OLDEST_SETUPTOOLS), ("pip", 22)):
        if find_spec(package) is None or int(re.split(r"\D", version(package))[0]) < oldest:
            pytest.skip(f"needs {package} {oldest} or newer in this environment")
    return tracked_files()


def copy_of_sources(tracked: set[str], into: Path) -> Path:
    """Copy the files of the repository, as they are now, to a new folder."""
    for name in tracked:
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, into / name)
    return into


def build_sdist(source: Path, out: Path) -> Path:
    run(sys.executable, "-c", HOOK, "build_sdist", out, folder=source)
    (built,) = out.glob("*.tar.gz")
    return built


def build_wheel(source: Path, out: Path) -> Path:
    run(sys.executable, "-c", HOOK, "build_wheel", out, folder=source)
    (built,) = out.glob("*.whl")
    return built


def unpacked(sdist: Path, into: Path) -> Path:
    """Unpack an sdist; return its only folder."""
    with tarfile.open(sdist) as file:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4
            file.extraction_filter = tarfile.data_filter
        file.extractall(into)
    return into / sdist.name.removesuffix(".tar.gz")


def environment_with(folder: Path, *what: str | Path) -> Path:
    """Create an environment with this package and the dependencies that are here; return its folder of programs.

    Args:
        folder: of the environment; it does not exist yet.
        what: arguments of `pip install` that name the package.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder.parent)
    variables = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", scheme="venv", vars=variables))
    here = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in here))
    python = folder / "bin" / "python"
    options = ("--quiet", "--no-index", "--no-deps", "--ignore-installed", "--no-build-isolation")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, *what, folder=folder.parent)
    return folder / "bin"
