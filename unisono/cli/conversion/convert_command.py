"""unisono convert: rewrite a script for DistributedDataParallel, DataParallel, Accelerate or one process."""

from __future__ import annotations

import json as json_
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from unisono.cli.commands.check import check as check_script
from unisono.cli.request.run_options import RunRequest
from unisono.cli.request.suggestions import WHOLE
from unisono.config import plural
from unisono.errors import SettingsError

INSTALL = "pip install 'unisono[convert]'"
Ranks = Annotated[int | None, WHOLE, Parameter(metavar="N", show_default=False)]


def convert(
    script: Path,
    out: Path | None = None,
    /,
    *,
    ranks: Ranks = None,
    no_check: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    force: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    request: RunRequest = RunRequest(),  # noqa: B008  (frozen)
) -> int:
    """Convert a training script of PyTorch or Accelerate into a script of Unisono, beside it.

    The difference is printed, and so are notes where the script does not say enough, with what to type. Then
    `unisono check` compares a few steps of the new script on 1, 2 and 3 processes. If the shape of the training loop is
    not understood, the message names the line, and no file is written.

    Exit status 1: the new script was written, and the check failed. With --json, the last line is the result of the
    check; with --no-check, it has the notes and the difference.

    Parameters
    ----------
    script
        A script that trains with DistributedDataParallel, DataParallel, Accelerate, or in one process.
    out
        The new file; by default SCRIPT_unisono.py beside the script.
    ranks
        Number of processes that the script was started with. The batch of a run is that of all processes together.
    no_check
        Leave out the check.
    force
        Overwrite an existing file.
    """
    target = out if out is not None else script.with_name(f"{script.stem}_unisono.py")
    line = ["unisono", "convert", str(script), *([str(out)] if out is not None else [])]
    source = _read(script)
    if ranks is not None and ranks < 1:
        raise SettingsError("--ranks must be at least 1.", f"It is {ranks}.", shlex.join([*line, "--ranks", "1"]))
    if target.exists() and (not force or target.resolve() == script.resolve()):
        other = target.with_name(f"{target.stem}_2.py")
        do = shlex.join([*line[:3], str(other)])
        do = do if target.resolve() == script.resolve() else f"{shlex.join([*line, '--force'])}, or: {do}"
        raise SettingsError(f"{target} exists.", "An existing file is overwritten only with --force.", do)
    if find_spec("libcst") is None:
        raise SettingsError("unisono convert needs the package libcst.", "It is not installed.", INSTALL)
    from unisono.convert.script_conversion import convert as converted  # here, because it loads libcst

    done = converted(source, script.name, target.name, ranks)
    try:
        target.write_text(done.code, encoding="utf-8")
    except OSError as error:
        do = shlex.join([*line[:3], str(Path.home() / target.name)])
        raise SettingsError(f"Cannot write {target}.", f"{error.strerror}.", do) from None
    screen = sys.stderr if request.json else sys.stdout
    print(done.diff, end="", file=screen)
    print(f"\nWritten to {target}{'' if done.notes else ', without notes'}.", file=screen)
    if done.notes:
        print(f"{plural(len(done.notes), 'note')} to read, each above the line that it is about:", file=screen)
    for number, note in done.notes:
        print(f"  {target.name}:{number}: {note}", file=screen)
    if request.json and no_check:
        notes = [{"line": number, "note": note} for number, note in done.notes]
        print(json_.dumps({"path": str(target), "notes": notes, "diff": done.diff}))
    if no_check:
        print(f"Not checked. Next: unisono check {shlex.quote(str(target))}", file=screen)
        return 0
    print(f"\nunisono check {shlex.quote(str(target))}", file=screen, flush=True)
    return check_script(str(target), request=request)


def _read(script: Path) -> str:
    """Return the source of a script. Raises SettingsError."""
    try:
        return script.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise SettingsError(f"{script} is no Python in UTF-8.", "It cannot be decoded.", "give a .py file.") from None
    except OSError as error:
        here = sorted(path.name for path in Path().glob("*.py"))
        do = f"unisono convert {here[0] if here else 'SCRIPT.py'}"
        raise SettingsError(f"Cannot read {script}.", f"{error.strerror}.", do) from None
