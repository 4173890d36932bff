"""What processes leave behind when another one dies, in the run's directory, for the run that begins again.

    runs/mine/left-behind/rank-00002-step-00000043.safetensors     process 2, which knew step 43 and the one before it

This is no checkpoint: it is written by one program and read by the next, minutes later on the same host, and then it is
gone. So nothing waits for the disk, and there is no manifest. But it is whole or not there, as all is here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FOLDER = "left-behind"


def dumped_steps(run_dir: Path) -> int:
    """The newest step that anybody has left something of; 0: nobody has."""
    names = [path.stem for path in _found(run_dir, "rank-*-step-*.safetensors")]
    return max((int(name.rpartition("-")[2]) for name in names), default=0)


def clear(run_dir: Path) -> None:
    """Nobody is to find what an earlier run has left."""
    shutil.rmtree(run_dir / FOLDER, ignore_errors=True)


def write(run_dir: Path, rank: int, step: int, tensors: Mapping[str, torch.Tensor], about: Any) -> None:
    """Leave these tensors, and what is to be known about them, as JSON. Raises OSError, or an error of safetensors."""
    from safetensors.torch import save_file  # with torch: half a second, which the launcher need not wait

    path = run_dir / FOLDER / f"rank-{rank:05d}-step-{step:08d}.safetensors"
    path.parent.mkdir(exist_ok=True)
    half = path.with_suffix(".half")
    save_file(dict(tensors), half, metadata={"about": json.dumps(about)})
    half.rename(path)


def read_dump(run_dir: Path, rank: int) -> tuple[dict[str, torch.Tensor], Any] | None:
    """What this rank's process has left, which is gone afterwards; None: nothing."""
    from safetensors import safe_open

    found = _found(run_dir, f"rank-{rank:05d}-*.safetensors")
    if not found:
        return None
    with safe_open(found[-1], "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
        about = json.loads(file.metadata()["about"])
    for path in found:
        path.unlink()
    with suppress(OSError):  # it is not empty yet
        found[0].parent.rmdir()
    return tensors, about


def _found(run_dir: Path, pattern: str) -> list[Path]:
    try:
        return sorted((run_dir / FOLDER).glob(pattern))
    except FileNotFoundError:  # another process has just taken the last of it
        return []
