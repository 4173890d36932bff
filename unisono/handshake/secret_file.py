"""Read the secret of a run from a file that only its owner can read, as ssh does with keys.

A group of this process may read a file of root: Kubernetes mounts a Secret in this way if the pod has an fsGroup.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from unisono.errors import SettingsError
from unisono.handshake.mutual_proof import RunSecret

LEAST_BYTES = 16
"""Fewer bytes can be guessed."""

MOST_BYTES = 4096

MAKE = "(umask 077; openssl rand -hex 32 > {}), and copy it to all nodes"


def read_secret(path: str) -> RunSecret:
    """Return the secret in a file, without white space at its ends.

    Raises:
        SettingsError: the file cannot be read, other users can read or change it, or its content is too short.
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(MOST_BYTES + 1).strip()
    except OSError as error:
        fact = f"{error.strerror}."
        raise SettingsError(f"Cannot read the secret file {path}.", fact, MAKE.format(path)) from None
    mode = stat.S_IMODE(status.st_mode)
    is_mounted = status.st_uid == 0 and os.getuid() != 0 and status.st_gid in (os.getgid(), *os.getgroups())
    if mode & (0o037 if is_mounted else 0o077) or status.st_uid not in (os.getuid(), 0):
        owner = "you" if status.st_uid == os.getuid() else f"user {status.st_uid}"
        fact = f"It belongs to {owner}, and its mode is {mode:o}."
        raise SettingsError(f"Other users can read or change the secret file {path}.", fact, f"chmod 600 {path}")
    if not LEAST_BYTES <= len(content) <= MOST_BYTES:
        fact = f"It has {len(content)} bytes, and a secret has {LEAST_BYTES} to {MOST_BYTES}."
        raise SettingsError(f"The secret file {path} has no usable secret.", fact, MAKE.format(path))
    return RunSecret(content)
