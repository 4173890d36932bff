"""Files in which processes dump their state when another process dies, for the run that is started again.

    runs/mine/left-behind/rank-00002-step-00000043.safetensors     process 2, which had the states after steps 42 and 43

A dump is no checkpoint: the restarted run reads it minutes later on the same host, and removes it. So no write waits
for the disk, and there is no manifest. A dump is written under another name and renamed, so a partial one is never
read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.json_forms import parse_value
from unisono.security.file_modes import make_folder, make_like_folder

if TYPE_CHECKING:
    import torch

FOLDER = "left-behind"


def dumped_steps(run_dir: Path) -> int:
    """Return the newest step of which there is a dump, or 0."""
    names = [path.stem for path in _found(run_dir, "rank-*-step-*.safetensors")]
    return max((int(name.rpartition("-")[2]) for name in names), default=0)


def clear(run_dir: Path) -> None:
    """Remove the dumps of an earlier run."""
    shutil.rmtree(run_dir / FOLDER, ignore_errors=True)


def write(run_dir: Path, rank: int, step: int, tensors: Mapping[str, torch.Tensor], plain: Any) -> None:
    """Dump tensors, and JSON that refers to them. Raises OSError, or an error of safetensors."""
    from safetensors.torch import save_file  # imports torch: half a second, which the launcher need not wait

    path = run_dir / FOLDER / f"rank-{rank:05d}-step-{step:08d}.safetensors"
    make_folder(path.parent)
    draft = path.with_suffix(".half")
    save_file(dict(tensors), draft, metadata={"about": json.dumps(plain)})
    make_like_folder(draft)
    draft.rename(path)


def read_dump(run_dir: Path, rank: int) -> tuple[dict[str, torch.Tensor], Any] | None:
    """Return the newest dump of a rank as (tensors, JSON), and remove its dumps; None if there is none."""
    from safetensors import safe_open

    found = _found(run_dir, f"rank-{rank:05d}-*.safetensors")
    if not found:
        return None
    with safe_open(found[-1], "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
        plain = parse_value(file.metadata()["about"])
    for path in found:
        path.unlink()
    with suppress(OSError):  # not empty yet
        found[0].parent.rmdir()
    return tensors, plain


def _found(run_dir: Path, pattern: str) -> list[Path]:
    try:
        return sorted((run_dir / FOLDER).glob(pattern))
    except FileNotFoundError:  # another process has just removed the folder
        return []
