"""Which checkpoints a run directory holds, and whether one is whole. Knows files only; no torch.

checkpoints/step-00000040/          complete: it was renamed to this name after everything in it was on the disk
    model-00001-of-00001.safetensors   the tensors (torch DCP, safetensors format)
    state.json                      everything else, and the run it belongs to
    manifest.json                   size and sha256 of every other file
checkpoints/.step-00000060.unfinished  what a crash or a full disk left; removed by the next save
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

_NAME = re.compile(r"step-(\d{8,})")


def checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(steps done, path) of the complete checkpoints of a run, the newest first."""
    folder = run_dir / "checkpoints"
    if not folder.is_dir():
        return []
    found = [(int(m[1]), path) for path in folder.iterdir() if (m := _NAME.fullmatch(path.name))]
    return sorted(found, reverse=True)


def name_of(steps: int) -> str:
    return f"step-{steps:08d}"


def unfinished(run_dir: Path, steps: int) -> Path:
    """Where a checkpoint is written before it is complete."""
    return run_dir / "checkpoints" / f".{name_of(steps)}.unfinished"


def seal(folder: Path) -> None:
    """Write the manifest of a folder, and see to it that everything in it is on the disk."""
    files = {}
    for path in sorted(p for p in folder.iterdir() if p.name != "manifest.json"):
        files[path.name] = {"size": path.stat().st_size, "sha256": _sha256(path)}
        _sync(path)
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({"files": files}, indent=1))
    _sync(manifest)
    _sync(folder)


def publish(folder: Path, steps: int) -> Path:
    """Give a sealed folder its final name: from here on the checkpoint exists."""
    final = folder.parent / name_of(steps)
    if final.exists():  # the same step saved again, after a resume: the same bits
        shutil.rmtree(final)
    folder.rename(final)
    _sync(folder.parent)
    return final


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file; None if it is whole. Reads every byte of it."""
    try:
        files = json.loads((folder / "manifest.json").read_text())["files"]
        if "state.json" not in files:
            return f"{folder / 'manifest.json'} does not name state.json"
        for name, stated in files.items():
            path = folder / name
            if not path.is_file():
                return f"{path} is missing"
            if path.stat().st_size != stated["size"]:
                return f"{path} has {path.stat().st_size} bytes instead of {stated['size']}"
            if _sha256(path) != stated["sha256"]:
                return f"{path} has been changed: its sha256 is not the manifest's"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{folder / 'manifest.json'} cannot be read ({error})"
    return None


def clear(run_dir: Path, steps: int, keep: int) -> None:
    """Keep the `keep` newest checkpoints up to that after `steps` steps; remove older ones, and what never became one.

    One after more steps than that was damaged, or this run would have gone on from it: it does not count.
    """
    upto = [path for after, path in checkpoints(run_dir) if after <= steps]
    for path in upto[keep:]:
        shutil.rmtree(path, ignore_errors=True)
    for path in (run_dir / "checkpoints").glob(".*.unfinished"):
        shutil.rmtree(path, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
