"""Choose the certificates of a run with secure.transport=tls: an organization's, or those of the run's own authority.

secure.ca, secure.cert, secure.key    files of an organization
secure.secret_file                    a secret that the user has copied to all hosts
otherwise                             a secret that the processes agree on through their store, where only members
                                      can reach it: a Unix socket of this host, forwarded by ssh or under TLS
"""

from __future__ import annotations

import secrets
from pathlib import Path

import torch.distributed as dist

from unisono.config.schema import SecureSettings
from unisono.environment import World
from unisono.errors import SettingsError, WorldError
from unisono.handshake.certificates import (
    Credentials,
    OrganizationFiles,
    organization_credentials,
    run_credentials,
)
from unisono.handshake.mutual_proof import RunSecret
from unisono.handshake.secret_file import read_secret

PRIVATE = ("unix://", "file://")
"""Beginnings of the addresses of stores that only members can reach."""

SECRET_KEY = "run-secret"
"""The key of the secret in such a store."""

SECRET_BYTES = 32


def is_private(world: World) -> bool:
    """Return whether only members of the run can reach the store through which its processes find each other."""
    return (world.store or "").startswith(PRIVATE) and not world.open_link


def choose_credentials(world: World, secure: SecureSettings, store: dist.Store) -> Credentials:
    """Return the certificate of this process, and what it demands of others.

    Args:
        world: this process's place in the run.
        secure: the settings.
        store: the store through which the processes find each other.

    Raises:
        WorldError: a file of this host cannot be used, or there is no secret that only members have.
    """
    try:
        return _credentials(world, secure, store)
    except (
        SettingsError
    ) as error:  # which rank 0 alone would print, and the files of another host may be the wrong ones
        raise WorldError.of(error.problems) from None


def _credentials(world: World, secure: SecureSettings, store: dist.Store) -> Credentials:
    if secure.ca and secure.cert and secure.key:
        files = OrganizationFiles(*(Path(world.folder, each) for each in (secure.ca, secure.cert, secure.key)))
        return organization_credentials(files, secure.hosts)
    return run_credentials(choose_secret(world, secure, store), secure.hosts)


def choose_secret(world: World, secure: SecureSettings, store: dist.Store) -> RunSecret:
    """Return the secret of the run.

    Raises:
        SettingsError: the file cannot be used.
        WorldError: there is no secret that only members have.
    """
    if secure.secret_file:
        return read_secret(str(Path(world.folder, Path(secure.secret_file).expanduser())))
    if not is_private(world):
        raise WorldError(
            "secure.transport = tls needs a secret or certificates.",
            "Every program that reaches the store of this run can read it, so the processes cannot agree on a secret.",
            _remedy(world),
        )
    chosen = store.compare_set(SECRET_KEY, "", secrets.token_hex(SECRET_BYTES))
    return RunSecret.from_hex(chosen.decode())


def _remedy(world: World) -> str:
    make = "(umask 077; openssl rand -hex 32 > FILE), copy FILE to all hosts"
    if world.open_link:
        return f"{make}, and add --secret-file FILE on all nodes"
    return f"{make}, and add --set secure.secret_file=FILE"
