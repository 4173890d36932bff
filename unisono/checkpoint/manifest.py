"""List the checkpoints of a folder, and check whether one is complete and undamaged. Reads files only; no torch.

checkpoints/step-00000040/          complete: renamed to this name after all files were on the disk
    rank-00000.safetensors             tensors of process 0, and its parts of sharded tensors
    rank-00000.json                    which of them are parts, and of what; size and sha256 of the .safetensors file
    rank-00001.safetensors             the same of process 1, if it stores any tensors
    rank-00001.json
    state.json                         everything that is no tensor, and the identity of the run
    signature.json                     with `secure.sign`: the sha256 of the files above, signed (signature.py)
    manifest.json                      size and sha256 of every other file, and a sha256 of its own content
checkpoints/.step-00000060.unfinished  left by a crash or a full disk; the next save removes it
checkpoints/elsewhere.json             in place of all these: where checkpoints are, if `checkpoint.dir` is set
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

from unisono.checkpoint import contents
from unisono.checkpoint.contents import STATE, SUFFIX
from unisono.checkpoint.regular_file import kind_of, open_regular, read_regular
from unisono.json_forms import is_count, is_text, parse_value
from unisono.security.file_modes import make_folder, write_text

MANIFEST, SIGNATURE, ELSEWHERE = "manifest.json", "signature.json", "elsewhere.json"

MOST_MANIFEST = 1 << 26
"""Largest size of a manifest in bytes: that of some 100,000 processes."""

LARGE = 1 << 22
"""Bytes of a checkpoint from which on several threads hash its files."""

NAME = re.compile(r"step-(\d{8,15})", re.ASCII)

FILE = re.compile(rf"rank-\d{{5,9}}(\.json|{re.escape(SUFFIX)})|{re.escape(STATE)}|{re.escape(SIGNATURE)}", re.ASCII)
"""Names of the files of a checkpoint. None is a path, so no file is outside of its folder."""

SHA256 = re.compile("[0-9a-f]{64}")


class WrittenFile(NamedTuple):
    """Size and digest of a file that was written."""

    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> WrittenFile:
        """Return size and digest of a file with this content."""
        return cls(len(content), hashlib.sha256(content).hexdigest())


def checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """Return (steps done, path) of a run's complete checkpoints, newest first; none if they are stored at a URL."""
    return checkpoints_in(Path(storage_history(run_dir)[0] or run_dir / "checkpoints"))


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """Return (steps done, path) of the complete checkpoints in a folder, newest first."""
    if not folder.is_dir():
        return []
    found = [(int(m[1]), path) for path in folder.iterdir() if (m := NAME.fullmatch(path.name))]
    return sorted(found, reverse=True)


def storage_history(run_dir: Path) -> list[str | None]:
    """Return where the checkpoints of a run have been stored, newest location first.

    A location is a folder, a URL, or None for the run directory. The list is [None] unless `checkpoint.dir` was set.
    """
    try:
        found = parse_value(read_regular(run_dir / "checkpoints" / ELSEWHERE, MOST_MANIFEST))["dirs"]
        return [location for location in found if location is None or isinstance(location, str)] or [None]
    except (OSError, ValueError, KeyError, TypeError):
        return [None]


def record_storage(run_dir: Path, location: str | None) -> None:
    """Record in the run directory that checkpoints are stored at this location from now on."""
    before = storage_history(run_dir)
    if location == before[0]:
        return
    folder = run_dir / "checkpoints"
    make_folder(folder)
    history = [location, *(other for other in before if other != location)]
    draft = folder / f".{ELSEWHERE}.{os.getpid()}"
    write_text(draft, json.dumps({"dirs": history}))
    draft.replace(folder / ELSEWHERE)


def any_of(run_dir: Path) -> bool:
    """Return whether a run has left checkpoints. One that stores them elsewhere counts without a look there."""
    return bool(storage_history(run_dir)[0] or checkpoints(run_dir))


def name_of(steps: int) -> str:
    """Return the name of the checkpoint after this number of steps."""
    return f"step-{steps:08d}"


def sealed(files: dict[str, WrittenFile]) -> bytes:
    """Return the content of the manifest of these files."""
    entries = {name: file._asdict() for name, file in sorted(files.items())}
    return json.dumps({"files": entries, "sha256": _sha256_of(entries)}, indent=1).encode()


def files_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Return size and sha256 of each file of a checkpoint, as its manifest states them.

    Raises:
        OSError: The manifest cannot be read.
        ValueError: It has another form, or has been changed.
    """
    content = parse_value(read_regular(folder / MANIFEST, MOST_MANIFEST))
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict) or content.keys() != {"files", "sha256"}:
        raise ValueError("it names no files")
    if content["sha256"] != _sha256_of(files):
        raise ValueError("it has been changed: its sha256 does not match its content")
    if STATE not in files:
        raise ValueError(f"it does not name {STATE}")
    for name, entry in files.items():
        if not FILE.fullmatch(name):
            raise ValueError(f"a checkpoint has no file {name!a}")
        if not isinstance(entry, dict) or entry.keys() != {"size", "sha256"}:
            raise ValueError(f"it does not state size and sha256 of {name}")
        if not is_count(entry["size"]) or not is_text(entry["sha256"]) or not SHA256.fullmatch(entry["sha256"]):
            raise ValueError(f"it does not state size and sha256 of {name}")
    return files


def damage_of(folder: Path) -> str | None:
    """Return a text that names the damaged file of a checkpoint, or None if all are intact. Reads every byte.

    A file is also damaged if its content does not fit that of the others (contents.py).
    """
    try:
        files = files_of(folder)
    except (OSError, ValueError) as error:
        return f"{folder / MANIFEST} cannot be read ({error})"
    named = NAME.fullmatch(folder.name)
    return _mismatch(folder, files) or contents.problem_of(folder, files, int(named[1]) if named else None)


def _mismatch(folder: Path, files: dict[str, Any]) -> str | None:
    """Return a text about the first file that does not match the manifest. Hashing in threads releases the GIL."""
    for name, expected in files.items():
        path = folder / name
        try:
            kind, size = kind_of(path), path.lstat().st_size
        except OSError as error:
            return f"{path} is missing" if isinstance(error, FileNotFoundError) else f"{path} cannot be read ({error})"
        if kind:
            return f"{path} is {kind}, and no file"
        if size != expected["size"]:
            return f"{path} has {size} bytes instead of {expected['size']}"
    paths, large = [folder / name for name in files], sum(entry["size"] for entry in files.values()) > LARGE
    with ThreadPoolExecutor(min(len(files), os.cpu_count() or 1)) if large else nullcontext() as readers:
        found = (readers.map if readers is not None else map)(_sha256, paths)
        for path, expected, sha256 in zip(paths, files.values(), found, strict=True):
            if sha256 != expected["sha256"]:
                return f"{path} has been changed: its sha256 does not match the manifest"
    return None


def _sha256_of(entries: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    """Return the sha256 of a file; a text with the error if it cannot be read."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        return str(error)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
