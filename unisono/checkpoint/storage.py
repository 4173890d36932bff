"""Where checkpoints are kept: a folder, or a URL of anything that fsspec knows (s3://bucket/run). No torch.

Both hold what manifest.py draws, and in both a checkpoint exists whole or not at all, each in its own manner:

    a folder   written beside the others under another name; one rename, when all is on the disk, makes it exist
    a URL      object stores have no rename: the manifest is written last, and what has none is no checkpoint

Several processes write one checkpoint, each its own sheet, and say so by a small file beside it; the main process waits
for these, seals and publishes. So they meet in the place itself, and training's own messages are left alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from unisono.checkpoint import manifest
from unisono.checkpoint.manifest import MANIFEST, WrittenFile, name_of
from unisono.config import plural
from unisono.errors import CheckpointError, SettingsError


class Storage(Protocol):
    """What saving and loading ask of it. Steps name a checkpoint."""

    def __str__(self) -> str: ...

    def checkpoints(self) -> list[int]:
        """The complete ones, by the steps done, the newest first."""

    def claim(self) -> None:
        """From now on this process saves here; it may be said again."""

    def write(self, steps: int, name: str, chunks: Iterable[bytes | memoryview]) -> WrittenFile:
        """Write a file of a checkpoint that is not complete yet; when this returns it would survive a power cut."""

    def read(self, steps: int, name: str) -> bytes | None:
        """The same file again; None: it is not there (yet)."""

    def publish(self, steps: int, files: dict[str, WrittenFile]) -> None:
        """These files are all there: from here on the checkpoint exists."""

    def discard(self, steps: int) -> None:
        """It is not to be."""

    def remove(self, steps: int) -> None:
        """A complete one goes."""

    def clear(self) -> None:
        """What never became one goes."""

    def fetch(self, steps: int, into: Path) -> Path:
        """A complete one as a folder of this machine."""

    def free(self) -> int | None:
        """Bytes that there is room for, if that can be known."""


class FolderStorage:
    """A folder of checkpoints."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def _draft(self, steps: int) -> Path:
        return self.root / f".{name_of(steps)}.unfinished"

    def checkpoints(self) -> list[int]:
        return [steps for steps, _ in manifest.checkpoints_in(self.root)]

    def claim(self) -> None:
        """A folder has a lock, which cli/request/run_dir.py takes when a run begins."""

    def write(self, steps: int, name: str, chunks: Iterable[bytes | memoryview]) -> WrittenFile:
        path = self._draft(steps) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        size, digest = 0, hashlib.sha256()
        try:
            with path.open("wb") as file:
                for chunk in chunks:
                    digest.update(chunk)
                    size += file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = error.filename or str(path)  # a full disk does not say which file was too much
            raise
        return WrittenFile(size, digest.hexdigest())

    def read(self, steps: int, name: str) -> bytes | None:
        try:
            return (self._draft(steps) / name).read_bytes()
        except FileNotFoundError:
            return None

    def publish(self, steps: int, files: dict[str, WrittenFile]) -> None:
        folder, final = self._draft(steps), self.root / name_of(steps)
        for path in folder.iterdir():  # of an attempt that failed, perhaps of more processes
            if path.name not in files:
                path.unlink()
        self.write(steps, MANIFEST, [manifest.sealed(files)])
        manifest.sync(folder)
        if final.exists():  # the same step saved again, after a resume: the same bits
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
        there = next((path for path in (self.root, *self.root.parents) if path.exists()), None)
        try:
            return None if there is None else shutil.disk_usage(there).free
        except OSError:
            return None


WRITER = "writer.json"
"""At a URL, who saves there: whoever began last. An object store knows no lock that a death would open; so nobody is
kept out by a process that is dead, and one that is alive, and has been replaced, is told before it changes anything."""


class BucketStorage:
    """A URL of fsspec's. (https://filesystem-spec.readthedocs.io; a put to S3 is there whole or not at all.)"""

    def __init__(self, url: str, **options: Any) -> None:
        self.url = url.rstrip("/")
        self._fs, self._root = _filesystem(self.url, options)
        self._mark: str | None = None

    def __str__(self) -> str:
        return self.url

    def _path(self, steps: int, name: str = "") -> str:
        return f"{self._root}/{name_of(steps)}" + (f"/{name}" if name else "")

    def checkpoints(self) -> list[int]:
        return sorted((steps for steps, whole in self._folders().items() if whole), reverse=True)

    def _folders(self) -> dict[int, bool]:
        """The steps of which there is something, and whether that is a checkpoint."""
        self._fs.invalidate_cache()
        found: dict[int, bool] = {}
        for path in self._fs.find(self._root) if self._fs.exists(self._root) else ():
            folder, _, name = path.rpartition("/")
            if match := manifest.NAME.fullmatch(folder.rpartition("/")[2]):
                found[int(match[1])] = found.get(int(match[1]), False) or name == MANIFEST
        return found

    def claim(self) -> None:
        if self._mark is not None:
            return
        self._mark = uuid.uuid4().hex
        about = {"mark": self._mark, "pid": os.getpid(), "host": socket.gethostname()}
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(f"{self._root}/{WRITER}", json.dumps(about).encode())

    def _see_that_it_is_ours(self) -> None:
        try:
            about = json.loads(self._fs.cat_file(f"{self._root}/{WRITER}"))
        except FileNotFoundError:
            about = {}
        if about.get("mark") != self._mark:
            raise CheckpointError(
                f"A checkpoint was to be saved in {self.url}.",
                f"Process {about.get('pid', '?')} on {about.get('host', '?')} began to save there after this one did.",
                "let one run save there: end the other, or give this one --set checkpoint.dir=URL of its own.",
            )

    def write(self, steps: int, name: str, chunks: Iterable[bytes | memoryview]) -> WrittenFile:
        size, digest = 0, hashlib.sha256()
        self._fs.makedirs(self._path(steps), exist_ok=True)  # an object store has none, and knows that
        file = self._fs.open(self._path(steps, name), "wb")
        try:
            for chunk in chunks:
                digest.update(chunk)
                size += file.write(chunk)
        except BaseException:
            with suppress(Exception):
                file.discard()  # or closing it would leave half of it under the whole one's name
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
        self._see_that_it_is_ours()
        self._fs.pipe_file(self._path(steps, MANIFEST), manifest.sealed(files))

    def discard(self, steps: int) -> None:
        """A checkpoint of the same step may have been there: without a manifest it is none any more."""
        self.remove(steps)

    def remove(self, steps: int) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm(self._path(steps, MANIFEST))  # first: what is half removed is no checkpoint
        with suppress(FileNotFoundError):
            self._fs.rm(self._path(steps), recursive=True)

    def clear(self) -> None:
        for steps, whole in self._folders().items():
            if not whole:
                self.remove(steps)

    def fetch(self, steps: int, into: Path) -> Path:
        folder = into / f".{name_of(steps)}.fetched" / name_of(steps)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for path in self._fs.ls(self._path(steps), detail=False):
            self._fs.get_file(path, str(folder / path.rpartition("/")[2]))
        return folder

    def free(self) -> int | None:
        return None


PACKAGES = {"s3": "unisono[s3]", "s3a": "unisono[s3]", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
"""What fsspec needs for a protocol."""


def _filesystem(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    """fsspec's file system, and the path within it. Raises CheckpointError where that cannot be had."""
    import fsspec  # type: ignore[import-untyped]

    try:
        fs, root = fsspec.core.url_to_fs(url, **options)
    except Exception as error:  # a missing package, a protocol that nobody knows, credentials
        protocol = url.partition("://")[0]
        missing = isinstance(error, ImportError) and protocol in PACKAGES
        do = f"pip install '{PACKAGES[protocol]}'" if missing else "--set checkpoint.dir=FOLDER, or another URL."
        raise CheckpointError(
            f"Checkpoints were to be kept in {url}.", f"fsspec says: {type(error).__name__}: {error}", do
        ) from error
    return fs, root.rstrip("/")


def place(where: str | Path, **options: Any) -> Storage:
    """The place that is meant: a folder, or a URL."""
    if isinstance(where, str) and "://" in where and not where.startswith(("file://", "local://")):
        return BucketStorage(where, **options)
    return FolderStorage(Path(str(where).removeprefix("file://").removeprefix("local://")))


def places_of(run_dir: Path) -> list[Storage]:
    """Where a run's checkpoints are, and where they were before, the newest place first."""
    return [place(where or run_dir / "checkpoints") for where in manifest.storage_history(run_dir)]


def place_of(run_dir: Path) -> Storage:
    """Where a run saves."""
    return places_of(run_dir)[0]


def prepare_storage(run_dir: Path, where: str | None, *, resume: bool) -> Path | None:
    """This run saves there from now on, as its directory will say; `{run}` stands for its name. Returns the folder, if
    it is one outside the run directory.

    Raises SettingsError where that cannot be had, or holds another run's checkpoints, since this one begins anew.
    """
    if where is None:
        manifest.record_storage(run_dir, None)
        return None
    try:
        there = place(where.replace("{run}", run_dir.name))
        steps = checkpoints_at(there)
    except CheckpointError as error:
        raise SettingsError.of(error.problems) from error
    if steps and not resume:
        true = f"A run has saved there already: {plural(len(steps), 'checkpoint')}, the newest after step {steps[0]}."
        other = f"{where}-2" if "{run}" in where else where.rstrip("/") + "/{run}"
        raise SettingsError(f"checkpoint.dir = {where}", true, f"--resume, or: --set checkpoint.dir='{other}'")
    manifest.record_storage(run_dir, str(there))
    return there.root if isinstance(there, FolderStorage) else None


def checkpoints_at(there: Storage) -> list[int]:
    """What checkpoints there are, by the steps done, the newest first. Raises CheckpointError if nobody can tell."""
    try:
        return there.checkpoints()
    except Exception as error:
        raise CheckpointError(
            f"The checkpoints in {there} were to be looked at.",
            f"{type(error).__name__}: {error}",
            "see that this machine may read there; or --set checkpoint.dir=ANOTHER.",
        ) from error


def clear_old(there: Storage, steps: int, keep: int, keep_every: int) -> None:
    """Keep the `keep` newest checkpoints up to that after `steps` steps, and, with `keep_every` above 0, all that are
    after a multiple of it; remove older ones, and what never became one.

    One after more steps than that was damaged, or this run would have gone on from it: it does not count.
    """
    upto = [after for after in there.checkpoints() if after <= steps]
    for after in upto[keep:]:
        if not keep_every or after % keep_every:
            there.remove(after)
    there.clear()
