"""Storage of checkpoints: a folder, or a URL with one of SCHEMES, which fsspec opens (s3://bucket/run). No torch.

Both hold the files that manifest.py lists, and in both a checkpoint is complete or does not exist:

    a folder   files are written to a draft folder; one rename, after all of them are on the disk, publishes it
    a URL      object stores have no rename: the manifest is written last, and a folder without one is no checkpoint

Several processes write one checkpoint. Each writes a safetensors file and a small report about it into the storage. The
main process waits for the reports, writes the manifest and publishes the checkpoint, so a save needs no collectives.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from unisono.checkpoint import manifest
from unisono.checkpoint.manifest import MANIFEST, WrittenFile, name_of
from unisono.checkpoint.signature import Sign, unsigned
from unisono.config import plural
from unisono.errors import CheckpointError, SettingsError
from unisono.json_forms import parse
from unisono.security.file_modes import make_folder, open_like_folder


class Storage(Protocol):
    """The operations that saving and loading need. A checkpoint is named by the number of steps done."""

    def __str__(self) -> str: ...

    def checkpoints(self) -> list[int]:
        """Return the steps of the complete checkpoints, newest first."""

    def claim(self) -> None:
        """Register this process as the one that saves here. Calling it again changes nothing."""

    def write(self, steps: int, name: str, chunks: Iterable[bytes | memoryview]) -> WrittenFile:
        """Write a file of a checkpoint that is not published yet. When this returns, it survives a power cut."""

    def read(self, steps: int, name: str) -> bytes | None:
        """Return the content of such a file, or None if it is not visible yet."""

    def publish(self, steps: int, files: dict[str, WrittenFile]) -> None:
        """Make a checkpoint of these files, all of which are written."""

    def discard(self, steps: int) -> None:
        """Remove the files of a checkpoint that will not be published."""

    def remove(self, steps: int) -> None:
        """Remove a complete checkpoint."""

    def clear(self) -> None:
        """Remove the files of all saves that did not finish."""

    def fetch(self, steps: int, into: Path) -> Path:
        """Return a complete checkpoint as a folder on this machine."""

    def free(self) -> int | None:
        """Return the free space in bytes, or None if it is unknown."""


class FolderStorage:
    """Checkpoints in a folder. `sign` returns the signature of each that is published."""

    def __init__(self, root: Path, sign: Sign = unsigned) -> None:
        self.root, self.sign = root, sign

    def __str__(self) -> str:
        return str(self.root)

    def _draft(self, steps: int) -> Path:
        return self.root / f".{name_of(steps)}.unfinished"

    def checkpoints(self) -> list[int]:
        return [steps for steps, _ in manifest.checkpoints_in(self.root)]

    def claim(self) -> None:
        """Do nothing: cli/request/run_dir.py locks the run directory when a run begins."""

    def write(self, steps: int, name: str, chunks: Iterable[bytes | memoryview]) -> WrittenFile:
        path = self._draft(steps) / name
        make_folder(path.parent)
        size, digest = 0, hashlib.sha256()
        try:
            with open(path, "wb", opener=open_like_folder) as file:
                for chunk in chunks:
                    digest.update(chunk)
                    size += file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = error.filename or str(path)  # the error of a full disk names no file
            raise
        return WrittenFile(size, digest.hexdigest())

    def read(self, steps: int, name: str) -> bytes | None:
        try:
            return (self._draft(steps) / name).read_bytes()
        except FileNotFoundError:
            return None

    def publish(self, steps: int, files: dict[str, WrittenFile]) -> None:
        files = {**files, **write_all(self, steps, self.sign(files))}
        folder, final = self._draft(steps), self.root / name_of(steps)
        for path in folder.iterdir():  # left by a failed attempt, perhaps of more processes
            if path.name not in files:
                path.unlink()
        self.write(steps, MANIFEST, [manifest.sealed(files)])
        manifest.sync(folder)
        if final.exists():  # saved before a resume, with the same bits
            shutil.rmtree(final)
        folder.rename(final)
        manifest.sync(self.root)

    def discard(self, steps: int) -> None:
        shutil.rmtree(self._draft(steps), ignore_errors=True)

    def remove(self, steps: int) -> None:
        shutil.rmtree(self.root / name_of(steps), ignore_errors=True)

    def clear(self) -> None:
        for path in (*self.root.glob(".*.unfinished"), *self.root.glob(".*.fetched")):
            shutil.rmtree(path, ignore_errors=True)

    def fetch(self, steps: int, into: Path) -> Path:
        return self.root / name_of(steps)

    def free(self) -> int | None:
        existing = next((path for path in (self.root, *self.root.parents) if path.exists()), None)
        try:
            return None if existing is None else shutil.disk_usage(existing).free
        except OSError:
            return None


WRITER = "writer.json"
"""File at a URL that names the process which saves there: the last one that began. An object store has no lock that is
released when a process dies. So a new process always takes over, and a live one that was replaced fails before it
publishes anything."""


class BucketStorage:
    """Checkpoints at a URL of fsspec (https://filesystem-spec.readthedocs.io). A put to S3 is atomic."""

    def __init__(self, url: str, sign: Sign = unsigned, **options: Any) -> None:
        self.url, self.sign = url.rstrip("/"), sign
        self._fs, self._root = _filesystem(self.url, options)
        self._token: str | None = None

    def __str__(self) -> str:
        return self.url

    def _path(self, steps: int, name: str = "") -> str:
        return f"{self._root}/{name_of(steps)}" + (f"/{name}" if name else "")

    def checkpoints(self) -> list[int]:
        return sorted((steps for steps, whole in self._folders().items() if whole), reverse=True)

    def _folders(self) -> dict[int, bool]:
        """Return {steps: whether the checkpoint is complete} of all folders."""
        self._fs.invalidate_cache()
        found: dict[int, bool] = {}
        for path in self._fs.find(self._root) if self._fs.exists(self._root) else ():
            folder, _, name = path.rpartition("/")
            if match := manifest.NAME.fullmatch(folder.rpartition("/")[2]):
                found[int(match[1])] = found.get(int(match[1]), False) or name == MANIFEST
        return found

    def claim(self) -> None:
        if self._token is not None:
            return
        self._token = uuid.uuid4().hex
        writer = {"mark": self._token, "pid": os.getpid(), "host": socket.gethostname()}
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(f"{self._root}/{WRITER}", json.dumps(writer).encode())

    def _check_claim(self) -> None:
        try:
            writer = parse(self._fs.cat_file(f"{self._root}/{WRITER}")) or {}
        except FileNotFoundError:
            writer = {}
        if writer.get("mark") != self._token:
            raise CheckpointError(
                f"Cannot save in {self.url}: another process saves there.",
                f"Process {writer.get('pid', '?')} on {writer.get('host', '?')} began to save there after this one.",
                "end one of the two runs, or give this one --set checkpoint.dir=URL of its own.",
            )

    def write(self, steps: int, name: str, chunks: Iterable[bytes | memoryview]) -> WrittenFile:
        size, digest = 0, hashlib.sha256()
        self._fs.makedirs(self._path(steps), exist_ok=True)  # does nothing in an object store
        file = self._fs.open(self._path(steps, name), "wb")
        try:
            for chunk in chunks:
                digest.update(chunk)
                size += file.write(chunk)
        except BaseException:
            with suppress(Exception):
                file.discard()  # closing it would leave a partial file under the final name
            raise
        file.close()
        return WrittenFile(size, digest.hexdigest())

    def read(self, steps: int, name: str) -> bytes | None:
        try:
            content: bytes = self._fs.cat_file(self._path(steps, name))
        except FileNotFoundError:
            return None
        return content

    def publish(self, steps: int, files: dict[str, WrittenFile]) -> None:
        self._check_claim()
        files = {**files, **write_all(self, steps, self.sign(files))}
        self._fs.pipe_file(self._path(steps, MANIFEST), manifest.sealed(files))

    def discard(self, steps: int) -> None:
        """Remove all files of this step. A complete checkpoint of the same step is lost with its manifest."""
        self.remove(steps)

    def remove(self, steps: int) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm(self._path(steps, MANIFEST))  # first, so that a partly removed folder is no checkpoint
        with suppress(FileNotFoundError):
            self._fs.rm(self._path(steps), recursive=True)

    def clear(self) -> None:
        for steps, whole in self._folders().items():
            if not whole:
                self.remove(steps)

    def fetch(self, steps: int, into: Path) -> Path:
        folder = into / f".{name_of(steps)}.fetched" / name_of(steps)
        shutil.rmtree(folder, ignore_errors=True)
        make_folder(folder)
        for path in self._fs.ls(self._path(steps), detail=False):
            name = path.rpartition("/")[2]
            if name == MANIFEST or manifest.FILE.fullmatch(name):  # others are no files of a checkpoint
                self._fs.get_file(path, str(folder / name))
        return folder

    def free(self) -> int | None:
        return None


def write_all(storage: Storage, steps: int, contents: Mapping[str, bytes]) -> dict[str, WrittenFile]:
    """Write small files of a checkpoint that is not published yet."""
    return {name: storage.write(steps, name, [content]) for name, content in contents.items()}


PACKAGES = {"s3": "unisono[s3]", "s3a": "unisono[s3]", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
"""The package that fsspec needs for a protocol."""

SCHEMES = (*PACKAGES, "file", "local", "memory")
"""Schemes of URLs at which checkpoints are stored. fsspec knows more, and some of them unpack archives, run programs,
or join several URLs to one; a run directory of unknown origin may name any."""


def _filesystem(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it. Raises CheckpointError if it cannot be opened."""
    import fsspec  # type: ignore[import-untyped]

    protocol = url.partition("://")[0]
    if protocol not in SCHEMES or "::" in url:
        facts = f"Checkpoints are stored at URLs that begin with {', '.join(f'{name}://' for name in SCHEMES)}."
        raise CheckpointError(
            f"Cannot store checkpoints at {url!a}.", facts, "--set checkpoint.dir=FOLDER, or such a URL."
        )
    try:
        fs, root = fsspec.core.url_to_fs(url, **options)
    except Exception as error:  # a missing package, credentials
        missing = isinstance(error, ImportError) and protocol in PACKAGES
        remedy = f"pip install '{PACKAGES[protocol]}'" if missing else "--set checkpoint.dir=FOLDER, or another URL."
        raise CheckpointError(
            f"Cannot open {url} to store checkpoints.", f"fsspec says: {type(error).__name__}: {error}", remedy
        ) from error
    return fs, root.rstrip("/")


def storage_at(location: str | Path, sign: Sign = unsigned, **options: Any) -> Storage:
    """Return the storage at a folder or a URL. `options` are those of fsspec's file system."""
    if isinstance(location, str) and "://" in location and not location.startswith(("file://", "local://")):
        return BucketStorage(location, sign, **options)
    return FolderStorage(Path(str(location).removeprefix("file://").removeprefix("local://")), sign)


def storages_of(run_dir: Path, sign: Sign = unsigned) -> list[Storage]:
    """Return all storages that a run has used, newest first."""
    return [storage_at(location or run_dir / "checkpoints", sign) for location in manifest.storage_history(run_dir)]


def storage_of(run_dir: Path, sign: Sign = unsigned) -> Storage:
    """Return the storage in which a run saves. `sign` returns the signature of each checkpoint."""
    return storages_of(run_dir, sign)[0]


def prepare_storage(run_dir: Path, location: str | None, *, resume: bool) -> Path | None:
    """Make a run save at this location from now on, and record it in the run directory.

    Args:
        run_dir: The run directory.
        location: A folder or a URL, in which `{run}` stands for the name of the run; None: the run directory.
        resume: The run is resumed. Checkpoints at the location are then expected.

    Returns:
        The folder, if it is one outside the run directory.

    Raises:
        SettingsError: The location cannot be opened, or it holds checkpoints of another run.
    """
    if location is None:
        manifest.record_storage(run_dir, None)
        return None
    try:
        storage = storage_at(location.replace("{run}", run_dir.name))
        steps = checkpoints_at(storage)
    except CheckpointError as error:
        raise SettingsError.of(error.problems) from error
    if steps and not resume:
        fact = f"A run has saved there already: {plural(len(steps), 'checkpoint')}, the newest after step {steps[0]}."
        other = f"{location}-2" if "{run}" in location else location.rstrip("/") + "/{run}"
        raise SettingsError(f"checkpoint.dir = {location}", fact, f"--resume, or: --set checkpoint.dir='{other}'")
    manifest.record_storage(run_dir, str(storage))
    return storage.root if isinstance(storage, FolderStorage) else None


def checkpoints_at(storage: Storage) -> list[int]:
    """Return the steps of the complete checkpoints, newest first. Raises CheckpointError if they cannot be listed."""
    try:
        return storage.checkpoints()
    except Exception as error:
        raise CheckpointError(
            f"Cannot list the checkpoints in {storage}.",
            f"{type(error).__name__}: {error}",
            "check that this machine may read there; or --set checkpoint.dir=ANOTHER.",
        ) from error


def clear_old(storage: Storage, steps: int, keep: int, keep_every: int) -> None:
    """Remove old checkpoints, and the files of saves that did not finish.

    The `keep` newest ones up to that after `steps` steps are kept; with `keep_every` above 0, so are all after a
    multiple of it. A checkpoint after more steps is not counted: it is damaged, or this run would have resumed from it.
    """
    candidates = [after for after in storage.checkpoints() if after <= steps]
    for after in candidates[keep:]:
        if not keep_every or after % keep_every:
            storage.remove(after)
    storage.clear()
