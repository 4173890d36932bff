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
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

MANIFEST, STATE, ELSEWHERE = "manifest.json", "state.json", "elsewhere.json"

LARGE = 1 << 22
"""Bytes of a checkpoint that several threads read."""

NAME = re.compile(r"step-(\d{8,})")


class WrittenFile(NamedTuple):
    """What was written under a name."""

    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> WrittenFile:
        return cls(len(content), hashlib.sha256(content).hexdigest())


def checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(steps done, path) of a run's complete checkpoints, the newest first; none, if they are kept at a URL."""
    return checkpoints_in(Path(storage_history(run_dir)[0] or run_dir / "checkpoints"))


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """The same of the folder that holds them."""
    if not folder.is_dir():
        return []
    found = [(int(m[1]), path) for path in folder.iterdir() if (m := NAME.fullmatch(path.name))]
    return sorted(found, reverse=True)


def storage_history(run_dir: Path) -> list[str | None]:
    """Where the checkpoints of a run have been kept, the newest place first: a folder, a URL, or None, which is its own
    directory. [None] unless `checkpoint.dir` ever said another."""
    try:
        found = json.loads((run_dir / "checkpoints" / ELSEWHERE).read_text(encoding="utf-8"))["dirs"]
    except (OSError, ValueError, KeyError, TypeError):
        return [None]
    return [where for where in found if where is None or isinstance(where, str)] or [None]


def record_storage(run_dir: Path, where: str | None) -> None:
    """From now on they are kept there, and the directory says so."""
    before = storage_history(run_dir)
    if where == before[0]:
        return
    folder = run_dir / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{ELSEWHERE}.{os.getpid()}"
    draft.write_text(json.dumps({"dirs": [where, *(other for other in before if other != where)]}), encoding="utf-8")
    draft.replace(folder / ELSEWHERE)


def any_of(run_dir: Path) -> bool:
    """Has this run left checkpoints, here or (as far as can be told without looking) elsewhere?"""
    return bool(storage_history(run_dir)[0] or checkpoints(run_dir))


def name_of(steps: int) -> str:
    return f"step-{steps:08d}"


def sealed(files: dict[str, WrittenFile]) -> bytes:
    """The manifest of these files."""
    told = {name: of._asdict() for name, of in sorted(files.items())}
    return json.dumps({"files": told, "sha256": _sha256_of(told)}, indent=1).encode()


def damage_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file; None if it is whole. Reads every byte of it."""
    manifest = folder / MANIFEST
    try:
        said = json.loads(manifest.read_text(encoding="utf-8"))
        files = said["files"]
        if STATE not in files:
            return f"{manifest} does not name {STATE}"
        if said["sha256"] != _sha256_of(files):
            return f"{manifest} has been changed: its sha256 is not its own"
        wrong = _misfit(folder, files)
        if wrong is not None:
            return wrong
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
    """The first file that is not as the manifest says. Large ones are read side by side: hashing does not need the
    interpreter."""
    for name, stated in files.items():
        path = folder / name
        if path.parent != folder or not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != stated["size"]:
            return f"{path} has {path.stat().st_size} bytes instead of {stated['size']}"
    paths, large = [folder / name for name in files], sum(stated["size"] for stated in files.values()) > LARGE
    with ThreadPoolExecutor(min(len(files), os.cpu_count() or 1)) if large else nullcontext() as readers:
        found = (readers.map if readers is not None else map)(_sha256, paths)
        for path, stated, sha256 in zip(paths, files.values(), found, strict=True):
            if sha256 != stated["sha256"]:
                return f"{path} has been changed: its sha256 is not the manifest's"
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
