"""Checkpoints that tests write by themselves, as a run of one process would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.checkpoint.manifest import name_of
from unisono.checkpoint.save import CheckpointSaver, packed
from unisono.checkpoint.storage import storage_of
from unisono.distributed.process_group import ProcessGroup
from unisono.tensors.codec import TensorTable


def save(run_dir: Path, steps: int, states: Mapping[str, Any], about: Mapping[str, Any], keep: int) -> Path:
    """Write the checkpoint after `steps` steps, keep the `keep` newest, and return its path."""
    state = packed(states, {"identity": {}, "changes": [], **about}, TensorTable())
    CheckpointSaver(ProcessGroup()).begin(storage_of(run_dir), steps, state, (keep, 0), wait=True)
    return run_dir / "checkpoints" / name_of(steps)
