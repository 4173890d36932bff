"""unisono export: a run's weights in one file, for everybody else."""

from __future__ import annotations

import json as json_
import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from unisono.checkpoint import manifest
from unisono.cli.commands.fingerprint import with_checkpoints
from unisono.config import plural
from unisono.errors import SettingsError


def export(
    folder: Path,
    out: Path,
    /,
    *,
    model: Annotated[str | None, Parameter(metavar="NAME")] = None,
    force: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
) -> int:
    """Write a run's weights to one safetensors file, under the model's own names.

    Tied weights are written once; safetensors.torch.load_model(model, OUT) puts them where they belong.

    Parameters
    ----------
    folder
        A run directory (its newest complete checkpoint is taken), or one checkpoint.
    out
        The file to write.
    model
        Of several tracked models only this one. By default all, each name preceded by its model's.
    force
        Overwrite a file that is there already.
    json
        Print what was written as JSON.
    """

    def line(folder: Path, out: Path, *flags: str) -> str:
        words = ["unisono", "export", str(folder), str(out), *(["--model", model] if model is not None else [])]
        return shlex.join([*words, *flags])

    asked = line(folder, out, *["--force"] * force)
    itself = any((folder / name).is_file() for name in ("state.json", "manifest.json"))
    if not itself and not manifest.any_of(folder):
        true = "There is no checkpoint in it." if folder.is_dir() else "There is no such folder."
        raise SettingsError(asked, f"{folder}: {true}", line(Path(with_checkpoints(folder)), out))
    if out.is_dir():
        raise SettingsError(asked, f"{out} is a folder.", line(folder, out / "model.safetensors"))
    if not out.parent.is_dir():
        raise SettingsError(asked, f"There is no folder {out.parent}.", f"mkdir -p {out.parent} && {asked}")
    if out.exists() and not force:
        beside = out.with_name(f"{out.stem}-2{out.suffix}")
        raise SettingsError(
            asked, f"{out} is there already.", f"{line(folder, out, '--force')}, or: {line(folder, beside)}"
        )
    from unisono.checkpoint.export_weights import export as write  # it loads torch, and that only now

    done = write(folder, out, model)
    if json:
        facts = {name: str(v) if isinstance(v, Path) else v for name, v in done._asdict().items()}
        print(json_.dumps(facts))
        return 0
    print(f"{done.path}: {plural(done.tensors, 'tensor')} after step {done.step}, {done.bytes / 1e6:.1f} MB")
    for name, first in done.aliases.items():
        print(f"{name} is {first}, and stands there once")
    if done.left_out:
        print(f"Left out, for it is no tensor: {', '.join(done.left_out)}")
    print(f"weights_sha256 {done.weights_sha256}")
    return 0
