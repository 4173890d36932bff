"""Save the state of a run: everything into a folder beside the others, then one rename. A crash leaves the last one."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter

from unisono.checkpoint import manifest
from unisono.checkpoint.pack import Tensors, pack
from unisono.errors import CheckpointError


def save(run_dir: Path, steps: int, states: Mapping[str, Any], about: Mapping[str, Any], keep: int) -> Path:
    """Write the checkpoint of a run after `steps` steps, and keep the `keep` newest.

    states  state dicts by name (model, optimizer, ...), whole on this process
    about   what else belongs to it, as JSON: the run's identity, its counters

    Raises CheckpointError if it cannot be written; the checkpoints that were there are then untouched.
    """
    tensors = Tensors()
    plain = {name: pack(state, name, tensors) for name, state in states.items()}
    folder = manifest.unfinished(run_dir, steps)
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if tensors:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
                dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder)), no_dist=True)
        (folder / "state.json").write_text(json.dumps({"steps": steps, **about, "states": plain}))
        manifest.seal(folder)
        final = manifest.publish(folder, steps)
    except (Exception, CheckpointException) as error:  # torch made that one a BaseException
        shutil.rmtree(folder, ignore_errors=True)
        raise _told(error, run_dir, steps, sum(t.nbytes for t in tensors.values())) from error
    manifest.clear(run_dir, steps, keep)
    return final


def _told(error: BaseException, run_dir: Path, steps: int, size: int) -> CheckpointError:
    cause = _first_os_error(error) or error
    there = manifest.checkpoints(run_dir)
    last = f"The checkpoint after step {there[0][0]} is whole." if there else "There is no earlier one."
    free = _free(run_dir)
    return CheckpointError(
        f"A checkpoint after step {steps} was to be written to {run_dir / 'checkpoints'}.",
        f"{type(cause).__name__}: {cause}. It takes {size / 1e6:.1f} MB{free}. {last}",
        "make room or mend the permissions, then start the same command with --resume.",
    )


def _first_os_error(error: BaseException | None) -> OSError | None:
    """The OSError somewhere behind `error`: DCP wraps it, once for each process."""
    seen: list[BaseException] = []
    todo = [error]
    while todo:
        e = todo.pop()
        if e is None or e in seen:
            continue
        if isinstance(e, OSError):
            return e
        seen.append(e)
        failures = getattr(e, "failures", None)
        wrapped = [f[0] if isinstance(f, tuple) else f for f in failures.values()] if isinstance(failures, dict) else []
        todo += [e.__cause__, e.__context__, *wrapped]
    return None


def _free(run_dir: Path) -> str:
    try:
        return f"; {shutil.disk_usage(run_dir).free / 1e6:.1f} MB are free there"
    except OSError:
        return ""
