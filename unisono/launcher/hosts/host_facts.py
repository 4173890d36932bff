"""Facts about a host that decide whether a run can start there, and how its processes reach those of other hosts."""

from __future__ import annotations

import hashlib
import platform
import shutil
import socket
import sys
import tempfile
import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

import unisono
from unisono.environment import variables
from unisono.machine.host_load import usable_cores


def facts_of(script: str, run_dir: str, mark: str) -> dict[str, Any]:
    """Return the facts of this host.

    Args:
        script: the path of the script.
        run_dir: the run directory.
        mark: the name of a file that the launcher has created in it.
    """
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "unisono": source_digest(),
        "script": digest_of(Path(script)),
        "sees_run_dir": Path(run_dir, mark).exists(),
        "free_bytes": _free_bytes(Path(run_dir)),
        "free_elsewhere": {folder: _free_bytes(Path(folder)) for folder in (tempfile.gettempdir(), "/dev/shm")},
        "cores": len(usable_cores()),
        "memory": psutil.virtual_memory().available,
        "interfaces": interfaces(),
        "time": time.time(),
        "executable": sys.executable,
    }


def reached_at() -> tuple[str, str] | None:
    """Return the addresses of the ssh client and of this host, as the connection of ssh uses them.

    See ENVIRONMENT in https://man.openbsd.org/ssh.
    """
    words = variables(["SSH_CONNECTION"]).get("SSH_CONNECTION", "").split()
    return (words[0], words[2]) if len(words) == 4 else None


def interfaces() -> dict[str, list[str]]:
    """Return the addresses of each network interface of this host."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [each.address.partition("%")[0] for each in addresses if each.family in families]
        for name, addresses in psutil.net_if_addrs().items()
    }


def digest_of(path: Path) -> str:
    """Return the sha256 of a file; "" if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


@cache
def source_digest() -> str:
    """Return version and sha256 of the source text of Unisono, which must be the same on all hosts."""
    folder, digest = Path(unisono.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return f"{_version('unisono')}, sources {digest.hexdigest()[:12]}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _free_bytes(folder: Path) -> int | None:
    """Return the free bytes of the file system of a folder; None if it does not exist."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
