"""Write shards one by one, each complete or not at all, and their index last.

    OUT/.unfinished.json      what is being written, and the shards that are done
    OUT/.shard-00003.partial  a shard that is being written
    OUT/shard-00002.tar       a shard that is done, with its checksum in .unfinished.json
    OUT/index.json            is written when all are done; then .unfinished.json is removed

Which samples are in which shard is planned before the first one is written, from names and sizes. So a command that was
killed continues with the shards that are missing, and the same folder gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from unisono.config.wording import plural
from unisono.data.shard_writing.content_check import problem_of
from unisono.data.shard_writing.source_samples import Part, Source, SourceSample
from unisono.data.streaming.sample_offsets import LineOffsets, Member, TarOffsets
from unisono.data.streaming.shard_index import INDEX, ShardEntry, ShardIndex, offsets_of, parse_index
from unisono.errors import DataError
from unisono.json_forms import parse

UNFINISHED = ".unfinished.json"
SKIPPED = "skipped.txt"
DRAFT = ".draft"
SHOWN = 10
"""Bad files that a message names."""

TAR_END = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True)
class ShardPlan:
    """What is written.

    Attributes:
        source: the samples.
        out: the folder of the shards.
        shard_bytes: about how many bytes a shard has.
        skip_bad: leave out files that are not what their names say.
    """

    source: Source
    out: Path
    shard_bytes: int
    skip_bad: bool

    @property
    def kind(self) -> Any:
        """Return the format of the shards."""
        return "jsonl" if self.source.form == "lines" else "tar"

    def parts(self) -> list[Sequence[SourceSample]]:
        """Return the samples of each shard."""
        ends, filled = [0], 0
        samples = self.source.samples
        for number, sample in enumerate(samples):
            if filled and filled + sample.size > self.shard_bytes:
                ends.append(number)
                filled = 0
            filled += sample.size
        return [samples[a:b] for a, b in zip(ends, [*ends[1:], len(samples)], strict=True)]

    def digest(self) -> str:
        """Return a hash of everything that the shards depend on but the contents of the files."""
        return self.source.digest(self.shard_bytes, self.skip_bad)


@dataclass
class Written:
    """What was written.

    Attributes:
        index: the index.
        resumed: shards that an earlier command had finished.
        skipped: files that were left out.
    """

    index: ShardIndex
    resumed: int
    skipped: list[str]


class Progress:
    """The shards that are done, in a file that each new one is added to."""

    def __init__(self, plan: ShardPlan) -> None:
        self.path, self.digest = plan.out / UNFINISHED, plan.digest()
        self.done: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def load(self) -> None:
        """Read the shards that an earlier command has finished. A shard with another size is written again."""
        about = parse(self.path.read_bytes()) or {} if self.path.exists() else {}
        self.done = {name: shard for name, shard in about.get("done", {}).items() if self._is_there(name, shard)}

    def load_finished(self, index: ShardIndex) -> bool:
        """Read the shards of an index, and return whether all of them are there, with their sizes."""
        known = {entry.name: {**asdict(entry), "skipped": []} for entry in index.shards}
        for shard in known.values():
            del shard["name"]
        self.done = {name: shard for name, shard in known.items() if self._is_there(name, shard)}
        return len(self.done) == len(known)

    def _is_there(self, name: str, shard: dict[str, Any]) -> bool:
        path = self.path.parent / name
        with suppress(OSError):
            return path.stat().st_size == shard["bytes"] and path.with_name(offsets_of(name)).stat().st_size > 0
        return False

    def add(self, entry: ShardEntry, skipped: list[str]) -> None:
        """Record a shard that is done, and the files that were left out of it."""
        with self._lock:
            about = {"samples": entry.samples, "bytes": entry.bytes, "sha256": entry.sha256, "skipped": skipped}
            self.done[entry.name] = about
            self.save()

    def save(self) -> None:
        """Write the file."""
        write_whole(self.path, json.dumps({"source": self.digest, "done": self.done}).encode())


def write_shards(plan: ShardPlan, workers: int, force: bool, report: Callable[[int, int], None]) -> Written:
    """Write all shards of a plan that are not there yet, and the index.

    Args:
        plan: what is written.
        workers: threads.
        force: replace other shards in the folder.
        report: is called with the shards that are done, and all.

    Raises:
        DataError: the folder has something else, a file is bad or cannot be read, or the disk is full.
    """
    progress = Progress(plan)
    finished = _open_folder(plan, progress, force)
    if finished is not None:
        return Written(finished, len(finished.shards), [])
    parts, resumed = plan.parts(), len(progress.done)
    names = [f"shard-{number:05d}.{plan.kind}" for number in range(len(parts))]
    bad: list[str] = []

    def write(number: int) -> None:
        if names[number] not in progress.done:
            entry, problems = _write_one(plan, names[number], parts[number])
            bad.extend([] if plan.skip_bad else problems)
            if plan.skip_bad or not problems:
                progress.add(entry, problems)
        report(len(progress.done), len(parts))

    try:
        with ThreadPoolExecutor(workers) as pool:
            for result in [pool.submit(write, number) for number in range(len(parts))]:
                try:
                    result.result()
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
    except OSError as error:
        raise _write_error(plan, error, len(progress.done), len(parts)) from None
    if bad:
        raise _bad_files(plan, sorted(bad))
    return _finish(plan, progress, names, resumed)


def _finish(plan: ShardPlan, progress: Progress, names: Sequence[str], resumed: int) -> Written:
    about = {name: dict(progress.done[name]) for name in names}
    skipped = [file for name in names for file in about[name].pop("skipped")]
    entries = tuple(ShardEntry(name, **about[name]) for name in names if about[name]["samples"])
    if not entries:
        raise _bad_files(plan, sorted(skipped))
    index = ShardIndex(plan.kind, entries, plan.source.classes, progress.digest, str(plan.out))
    if skipped:
        write_whole(plan.out / SKIPPED, "".join(f"{line}\n" for line in sorted(skipped)).encode())
    write_whole(plan.out / INDEX, index.text().encode())
    progress.path.unlink()
    return Written(index, resumed, skipped)


def _open_folder(plan: ShardPlan, progress: Progress, force: bool) -> ShardIndex | None:
    """Make the folder, or read what an earlier command has done there. Return its index if everything is done."""
    out = plan.out
    try:
        out.mkdir(parents=True, exist_ok=True)
        there = {path.name for path in out.iterdir() if not path.name.endswith(DRAFT)}
        known = _source_of(out)
        if known == progress.digest and not force:
            if INDEX in there:
                index = parse_index((out / INDEX).read_bytes(), str(out))
                if progress.load_finished(index):
                    return index
                if plan.skip_bad:  # which files were left out of which shard is not known any more
                    progress.done = {}
            else:
                progress.load()
        elif there and not force:
            fact = "Its shards are of other files or other options" if known else "It has files, and no index"
            raise DataError(f"Cannot write shards into {out}.", f"{fact}.", "give a new folder, or add --force.")
        elif there and not known:
            fact = "It has files that unisono shards has not written, and --force removes only shards."
            raise DataError(f"Cannot write shards into {out}.", fact, "give a new folder.")
        progress.save()  # before the index is removed: a command that is killed here continues, too
        for path in out.iterdir():
            name = path.name.removesuffix(".json") if path.name.startswith("shard-") else path.name
            is_ours = name in (INDEX, SKIPPED) or name.endswith(DRAFT) or name.startswith(("shard-", ".shard-"))
            if is_ours and name not in progress.done:
                path.unlink()
    except OSError as error:
        raise _write_error(plan, error, 0, 0) from None
    return None


def _source_of(out: Path) -> str:
    """Return the digest of what the shards in a folder were written from; "": there are none."""
    for name in (INDEX, UNFINISHED):
        with suppress(OSError):
            return str((parse((out / name).read_bytes()) or {}).get("source", "?"))
    return ""


class _Hashed:
    """A file that is written, and its checksum."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self.sha256 = file, 0, hashlib.sha256()

    def write(self, content: bytes) -> None:
        self.sha256.update(content)
        self.size += self.file.write(content)


def _write_one(plan: ShardPlan, name: str, samples: Sequence[SourceSample]) -> tuple[ShardEntry, list[str]]:
    """Write one shard. Return its entry, and its bad files: with `skip_bad` they are left out, else the shard is."""
    partial = plan.out / f".{name}.partial"
    offsets: TarOffsets | LineOffsets = LineOffsets() if plan.kind == "jsonl" else TarOffsets()
    problems: list[str] = []
    with open(partial, "wb") as file:
        out = _Hashed(file)
        for sample in samples:
            contents = [_read(part) for part in sample.parts]
            if plan.kind == "jsonl" and not contents[0].strip():
                continue
            found = [problem_of(part, content) for part, content in zip(sample.parts, contents, strict=True)]
            if wrong := [problem for problem in found if problem]:
                problems += wrong
                continue
            if isinstance(offsets, LineOffsets):
                offsets.add(*_add_line(out, contents[0]))
            else:
                offsets.add(sample.key, _add_members(out, sample, contents))
        if plan.kind == "tar":
            out.write(TAR_END)
        file.flush()
        os.fsync(file.fileno())
    entry = ShardEntry(name, len(offsets), out.size, out.sha256.hexdigest())
    if problems and not plan.skip_bad:
        partial.unlink()
    elif not offsets:
        partial.unlink()
        entry = ShardEntry(name, 0, 0, entry.sha256)
    else:
        write_whole(plan.out / offsets_of(name), json.dumps(offsets.as_json(), separators=(",", ":")).encode())
        partial.replace(plan.out / name)
    return entry, problems


def _read(part: Part) -> bytes:
    try:
        with open(part.path, "rb") as file:
            file.seek(part.begin)
            return file.read(part.size if part.extension == "jsonl" else -1)
    except OSError as error:
        fact = f"{error.strerror}. It was there when the folder was listed."
        raise DataError(f"Cannot read {part.path}.", fact, "repeat the command: it continues.") from None


def _add_line(out: _Hashed, content: bytes) -> tuple[int, int]:
    """Write a line, and return its first byte and the one after it."""
    line = content.strip()
    begin = out.size
    out.write(line + b"\n")
    return begin, begin + len(line)


def _add_members(out: _Hashed, sample: SourceSample, contents: Sequence[bytes]) -> list[Member]:
    """Write the members of a sample, and return where they are."""
    members = [(part.extension, content) for part, content in zip(sample.parts, contents, strict=True)]
    if sample.label >= 0:
        members.append(("cls", b"%d" % sample.label))
    places: list[Member] = []
    for extension, content in members:
        info = tarfile.TarInfo(f"{sample.key}.{extension}")
        info.size = len(content)
        out.write(info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
        places.append((extension, out.size, len(content)))
        out.write(content + bytes(-len(content) % tarfile.BLOCKSIZE))
    return places


def write_whole(path: Path, content: bytes) -> None:
    """Write a file at once: it has its old or its new content, whatever happens."""
    draft = path.with_name(f".{path.name.lstrip('.')}{DRAFT}")
    with open(draft, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _write_error(plan: ShardPlan, error: OSError, done: int, count: int) -> DataError:
    where = f" {done} of {count} shards are done." if count else ""
    return DataError(
        f"Cannot write shards into {plan.out}.",
        f"{error.strerror}.{where}",
        "make room, or give another folder. The same command writes the shards that are missing.",
    )


def _bad_files(plan: ShardPlan, bad: Sequence[str]) -> DataError:
    more = [f"and {len(bad) - SHOWN} more"] if len(bad) > SHOWN else []
    return DataError(
        f"{plural(len(bad), 'file is', 'files are')} damaged, or not what the name says.",
        "\n  ".join([*bad[:SHOWN], *more]),
        "repair them and repeat the command, which continues; or add --skip-bad, which leaves them out.",
    )
