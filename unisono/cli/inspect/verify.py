"""unisono verify: check the signature of a checkpoint or of exported weights."""

from __future__ import annotations

import json as json_
import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from unisono.checkpoint.signature import check_checkpoint, check_export, key_id, trusted_keys
from unisono.cli.commands.fingerprint import no_checkpoint, with_checkpoints
from unisono.errors import CheckpointError, SettingsError


def verify(
    path: Path,
    /,
    *,
    key: Annotated[tuple[Path, ...], Parameter(metavar="PUBLIC", negative=(), consume_multiple=False)] = (),
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
) -> int:
    """Check that a key has signed a checkpoint or exported weights, and that no file has changed since.

    Parameters
    ----------
    path
        A run directory, for its newest checkpoint; a checkpoint; or a file that `unisono export --sign` has written.
    key
        A file with an Ed25519 public key, in PEM or OpenSSH's format. Repeat it to accept one of several.
    json
        Print the result as JSON.
    """
    if not key:
        do = shlex.join(["unisono", "verify", str(path), "--key", "PUBLIC.pem"])
        raise SettingsError("--key is missing.", "A signature proves nothing without the key of its owner.", do)
    keys = trusted_keys(key)
    if path.is_file():
        what, found = path, check_export(path, keys)
    else:
        if error := no_checkpoint(path):
            do = shlex.join(["unisono", "verify", with_checkpoints(path), "--key", str(key[0])])
            raise SettingsError(error, "The argument is a run directory, a checkpoint, or an exported file.", do)
        from unisono.checkpoint.load import complete_checkpoint, release  # here, because it loads torch

        damages: list[str] = []
        what = complete_checkpoint(path, "Cannot check the signature of {}.", note=damages.append)
        if damages:  # an older checkpoint proves nothing about this one
            do = f"restore it from a copy, or check an older one: unisono verify {shlex.quote(str(what))} --key ..."
            raise CheckpointError(f"Cannot check the newest checkpoint of {path}.", damages[0], do)
        found = check_checkpoint(what, keys)
        release(what)
    if json:
        print(json_.dumps({"path": str(what), "key": str(found.path), "key_id": key_id(found.key)}))
    else:
        print(f"{what}: all files are those that {found.path} signed ({key_id(found.key)})")
    return 0
