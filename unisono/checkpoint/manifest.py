"""Which checkpoints a folder holds, and whether one is whole. Knows files only; no torch.

checkpoints/step-00000040/          complete: it was renamed to this name after everything in it was on the disk
    rank-00000.safetensors             the tensors that process 0 had, and its parts of those that lay over several
    rank-00000.json                    which of them are parts, and of what; size and sha256 of the file beside it
    rank-00001.safetensors             the same of process 1, if there was anything that only it had
    rank-00001.json
    state.json                         everything else, and the run it belongs to
    manifest.json                      size and sha256 of every other file, and the sha256 of what it says itself
checkpoints/.step-00000060.unfinished  what a crash or a full disk left; removed by the next save
checkpoints/elsewhere.json             instead of all these: where checkpoints are, if `checkpoint.dir` says so
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

MANIFEST, STATE, ELSEWHERE = "manifest.json", "state.json", "elsewhere.json"

NAME = re.compile(r"step-(\d{8,})")


class Written(NamedTuple):
    """What was written under a name."""

    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> Written:
        return cls(len(content), hashlib.sha256(content).hexdigest())


def checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(steps done, path) of the complete checkpoints in a run directory, the newest first."""
    return within(run_dir / "checkpoints")


def within(folder: Path) -> list[tuple[int, Path]]:
    """The same of the folder that holds them."""
    if not folder.is_dir():
        return []
    found = [(int(m[1]), path) for path in folder.iterdir() if (m := NAME.fullmatch(path.name))]
    return sorted(found, reverse=True)


def elsewhere(run_dir: Path) -> str | None:
    """Where the checkpoints of a run are, if not in its directory: a folder or a URL."""
    try:
        found = json.loads((run_dir / "checkpoints" / ELSEWHERE).read_text(encoding="utf-8"))["dir"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def any_of(run_dir: Path) -> bool:
    """Has this run left checkpoints, here or (as far as can be told without looking) elsewhere?"""
    return elsewhere(run_dir) is not None or bool(checkpoints(run_dir))


def name_of(steps: int) -> str:
    return f"step-{steps:08d}"


def sealed(files: dict[str, Written]) -> bytes:
    """The manifest of these files."""
    told = {name: of._asdict() for name, of in sorted(files.items())}
    return json.dumps({"files": told, "sha256": _sha256_of(told)}, indent=1).encode()


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file; None if it is whole. Reads every byte of it."""
    manifest = folder / MANIFEST
    try:
        said = json.loads(manifest.read_text(encoding="utf-8"))
        files = said["files"]
        if STATE not in files:
            return f"{manifest} does not name {STATE}"
        wrong = _misfit(folder, files)
        if wrong is not None:
            return wrong
        if said["sha256"] != _sha256_of(files):
            return f"{manifest} has been changed: its sha256 is not its own"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{manifest} cannot be read ({error})"
    try:
        steps = json.loads((folder / STATE).read_text(encoding="utf-8"))["steps"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{folder / STATE} cannot be read ({error})"
    if NAME.fullmatch(folder.name) and folder.name != name_of(steps):
        return f"{folder / STATE} is of the checkpoint after step {steps}"
    return None


def _misfit(folder: Path, files: dict[str, Any]) -> str | None:
    """The first file that is not as the manifest says. Hashing leaves the interpreter to others, so files are read side
    by side."""
    for name, stated in files.items():
        path = folder / name
        if path.parent != folder or not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != stated["size"]:
            return f"{path} has {path.stat().st_size} bytes instead of {stated['size']}"
    with ThreadPoolExecutor(min(len(files), os.cpu_count() or 1)) as readers:
        found = readers.map(_sha256, [folder / name for name in files])
        for (name, stated), sha256 in zip(files.items(), found, strict=True):
            if sha256 != stated["sha256"]:
                return f"{folder / name} has been changed: its sha256 is not the manifest's"
    return None


def _sha256_of(told: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
