"""unisono shards: write tar or JSON-lines shards with an index from a folder."""

from __future__ import annotations

import json as json_
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

from cyclopts import Parameter

from unisono.cli.request.suggestions import WHOLE
from unisono.config import plural
from unisono.config.wording import nearest_name, size
from unisono.errors import SettingsError

if TYPE_CHECKING:
    from unisono.data.shard_writing.shard_writer import Written

Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
MOST_WORKERS = 4


def shards(
    folder: Path,
    out: Path,
    /,
    *,
    form: Annotated[Literal["classes", "files", "lines"] | None, Parameter(show_default=False)] = None,
    order: Annotated[Literal["shuffled", "sorted"] | None, Parameter(show_default=False)] = None,
    seed: Annotated[int, WHOLE] = 0,
    shard_size: Annotated[str, Parameter(metavar="SIZE")] = "256MB",
    workers: Annotated[int | None, WHOLE, Parameter(metavar="N", show_default=False)] = None,
    skip_bad: Flag = False,
    force: Flag = False,
    json: Flag = False,
) -> int:
    """Write the files of a folder as shards with an index, for unisono.Stream.indexed(OUT).

    The same folder and options give the same bytes. A command that was killed, or that had no space left, continues
    when it is repeated. Pictures and lines that are damaged, or not what their names say, are named.

    Parameters
    ----------
    folder
        A folder for each class, with files in it; or files, of which those that share a name up to its first dot are
        one sample; or files of JSON lines.
    out
        The folder of the shards: a new one, or that of the same command.
    form
        How the samples are stored; by default found by what is in the folder.
    order
        shuffled: in a fixed random order, by default for classes and files. Streams shuffle within a window only, so
        neighbors should not be of one class. sorted: by name; lines as they are.
    seed
        Of the shuffle.
    shard_size
        About how large a shard is.
    workers
        Threads that write; by default one for each core, and at most 4.
    skip_bad
        Leave out damaged files, and list them in OUT/skipped.txt.
    force
        Replace shards of other files.
    json
        Print a summary as JSON.
    """
    from unisono.data.shard_writing.shard_writer import ShardPlan, write_shards
    from unisono.data.shard_writing.source_samples import find_samples

    shard_bytes = _checked_size(folder, out, shard_size, workers)
    screen = sys.stderr if json else sys.stdout
    source = find_samples(folder, form, order, seed)
    print(f"{plural(len(source.samples), 'sample')} in {folder} ({source.form})", file=screen, flush=True)
    draws = screen.isatty()

    def report(done: int, count: int) -> None:
        if draws:
            print(f"\r{done} of {plural(count, 'shard')}", end="\n" * (done == count), file=screen, flush=True)

    threads = workers or min(MOST_WORKERS, os.cpu_count() or 1)
    _print_done(write_shards(ShardPlan(source, out, shard_bytes, skip_bad), threads, force, report), out, screen, json)
    return 0


def _checked_size(folder: Path, out: Path, shard_size: str, workers: int | None) -> int:
    """Return the bytes of a shard. Raises SettingsError for a request that is wrong."""
    from unisono.costs.device_table import bytes_in

    line = shlex.join(["unisono", "shards", str(folder), str(out)])
    if (shard_bytes := bytes_in(shard_size)) < 1:
        do = f"{line} --shard-size 1GB"
        raise SettingsError(f"--shard-size {shard_size} is no size.", "It is a number with a unit.", do)
    if workers is not None and workers < 1:
        raise SettingsError("--workers must be at least 1.", f"It is {workers}.", f"{line} --workers 1")
    if not folder.exists():
        parent = folder.parent
        here = sorted(path.name for path in parent.iterdir()) if parent.is_dir() else []
        fact = f"{parent.resolve()} has {', '.join(here[:8]) or 'nothing'}." if here else f"{parent} is no folder."
        near = nearest_name(folder.name, here)
        do = shlex.join(["unisono", "shards", str(parent / near) if near else "FOLDER", str(out)])
        raise SettingsError(f"There is no {folder}.", fact, do)
    if folder.is_dir() and out.resolve().is_relative_to(folder.resolve()):
        other = folder.resolve().with_name(f"{folder.resolve().name}-shards")
        fact = "The shards would be files of the folder that they are written from."
        do = shlex.join(["unisono", "shards", str(folder), str(other)])
        raise SettingsError(f"{out} is inside {folder}.", fact, do)
    return shard_bytes


def _print_done(done: Written, out: Path, screen: TextIO, json: bool) -> None:
    """Print what was written."""
    entries = done.index.shards
    samples, total = sum(entry.samples for entry in entries), sum(entry.bytes for entry in entries)
    if done.resumed:
        print(f"{plural(done.resumed, 'shard was', 'shards were')} there already.", file=screen)
    if done.skipped:
        print(f"{plural(len(done.skipped), 'bad file was', 'bad files were')} left out: {out}/skipped.txt", file=screen)
    print(f"{plural(len(entries), 'shard')} with {plural(samples, 'sample')}, {size(total)}, in {out}", file=screen)
    if json:
        summary = {"out": str(out), "kind": done.index.kind, "shards": len(entries), "samples": samples, "bytes": total}
        summary |= {"classes": len(done.index.classes), "resumed": done.resumed, "skipped": len(done.skipped)}
        print(json_.dumps(summary))
    else:
        print(f'Next: unisono.Stream.indexed("{out}")')
