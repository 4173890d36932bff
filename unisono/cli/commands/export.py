"""unisono export: write a run's weights to one file for other programs."""

from __future__ import annotations

import json as json_
import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from unisono.checkpoint.signature import private_key, sign_export, trusted_keys
from unisono.cli.commands.fingerprint import no_checkpoint, with_checkpoints
from unisono.config import plural
from unisono.errors import SettingsError


def export(
    folder: Path,
    out: Path,
    /,
    *,
    model: Annotated[str | None, Parameter(metavar="NAME")] = None,
    sign: Annotated[Path | None, Parameter(metavar="KEY")] = None,
    trust: Annotated[tuple[Path, ...], Parameter(metavar="KEY", negative=(), consume_multiple=False)] = (),
    force: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
) -> int:
    """Write a run's weights to one safetensors file, under the model's own names.

    Tied weights are written once; safetensors.torch.load_model(model, OUT) restores them.

    Parameters
    ----------
    folder
        A run directory, for its newest complete checkpoint, or a checkpoint.
    out
        The file to write.
    model
        Write only this model. By default all tracked models are written, with the model's name as a prefix.
    sign
        Sign the file with this private key, in OUT.signature.json.
    trust
        Export only a checkpoint that this public key, or another one of several, has signed.
    force
        Overwrite an existing file.
    json
        Print a summary as JSON.
    """

    def line(folder: Path, out: Path, *flags: str) -> str:
        words = ["unisono", "export", str(folder), str(out), *(["--model", model] if model is not None else [])]
        return shlex.join([*words, *flags])

    if error := no_checkpoint(folder):
        facts = "The first argument is a run directory, or a checkpoint."
        raise SettingsError(error, facts, line(Path(with_checkpoints(folder)), out))
    if out.is_dir():
        raise SettingsError(f"{out} is a folder.", "Weights go to one file.", line(folder, out / "model.safetensors"))
    if not out.parent.is_dir():
        do = f"mkdir -p {out.parent} && {line(folder, out, *['--force'] * force)}"
        raise SettingsError(f"Cannot write {out}.", f"There is no folder {out.parent}.", do)
    if out.exists() and not force:
        other = out.with_name(f"{out.stem}-2{out.suffix}")
        do = f"{line(folder, out, '--force')}, or: {line(folder, other)}"
        raise SettingsError(f"{out} exists.", "An existing file is overwritten only with --force.", do)
    from unisono.checkpoint.export_weights import export as write  # here, because it loads torch
    from unisono.checkpoint.load import only_signed

    key = private_key(sign) if sign is not None else None
    done = write(folder, out, model, accept=only_signed(trusted_keys(trust)))
    signature = sign_export(out, key) if key is not None else None
    if json:
        summary = {name: str(v) if isinstance(v, Path) else v for name, v in done._asdict().items()}
        summary["signature"] = None if signature is None else str(signature)
        print(json_.dumps(summary))
        return 0
    print(f"{done.path}: {plural(done.tensors, 'tensor')} after step {done.step}, {done.bytes / 1e6:.1f} MB")
    for name, first in done.aliases.items():
        print(f"{name} is tied to {first}, and is written once")
    if done.left_out:
        print(f"Left out, because they are not tensors: {', '.join(done.left_out)}")
    if signature is not None:
        print(f"{signature}: the signature")
    print(f"weights_sha256 {done.weights_sha256}")
    return 0
