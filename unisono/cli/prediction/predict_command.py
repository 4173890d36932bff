"""unisono predict: compute the outputs of a trained model for other data, on several processes."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from unisono.cli.commands.fingerprint import no_checkpoint, with_checkpoints
from unisono.cli.compare.rerun import earlier
from unisono.cli.prediction.batch_prediction import BatchPrediction
from unisono.config import CommandLine
from unisono.errors import SettingsError
from unisono.prediction import SUFFIXES


def predict(
    folder: Path,
    data: Path,
    out: Path,
    /,
    *,
    ranks: Annotated[int, Parameter(name=("--ranks", "-n"), metavar="N")] = 1,
    model: Annotated[str | None, Parameter(metavar="NAME")] = None,
    script: Annotated[Path | None, Parameter(metavar="FILE", show_default=False)] = None,
    force: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
) -> int:
    """Compute the outputs of a run's model for a file or folder, in the order of the data.

    The script of the run builds the model, and its predict function reads the data (unisono.main(main,
    predict=predict)). Without one, the data are tensors with the names of the model's arguments, in a .safetensors
    file. The bits do not depend on the number of processes. If the command is stopped, the same command continues.

    Parameters
    ----------
    folder
        A run directory, for its newest complete checkpoint.
    data
        The file or folder to predict for.
    out
        The file to write: .jsonl, with a line for each sample, or .safetensors.
    ranks
        The number of processes.
    model
        The model to use, if the run tracks several.
    script
        The script of the run, if it was moved.
    force
        Overwrite an existing file, and discard parts of another prediction.
    json
        Print a summary as JSON.
    """
    words = ["unisono", "predict", str(folder), str(data), str(out), *(["--model", model] if model else [])]
    words += ["--ranks", str(ranks)] if ranks != 1 else []
    line = CommandLine(tuple(words))
    _check(folder, data, out, ranks, words, force=force)
    with tempfile.TemporaryDirectory(prefix="unisono-predict-") as scratch:
        return BatchPrediction(
            again=earlier(folder, script, line),
            shown=folder,
            data=data.absolute(),
            out=out.absolute(),
            model=model or "",
            ranks=ranks,
            force=force,
            folder=Path(scratch),
            line=line,
            as_json=json,
        ).run()


def _check(folder: Path, data: Path, out: Path, ranks: int, words: list[str], *, force: bool) -> None:
    """Raise SettingsError for a request that cannot work."""
    typed = shlex.join(words)
    if error := no_checkpoint(folder):
        do = shlex.join([*words[:2], with_checkpoints(folder), *words[3:]])
        raise SettingsError(error, "The first argument is a run directory.", do)
    if not data.exists():
        raise SettingsError(f"There is no file or folder {data}.", "The second argument has the data.", typed)
    if out.suffix not in SUFFIXES:
        do = shlex.join([*words[:4], str(out.with_suffix(SUFFIXES[0])), *words[5:]])
        raise SettingsError(f"Cannot write {out}.", f"The output is one of {', '.join(SUFFIXES)}.", do)
    if not out.parent.is_dir():
        raise SettingsError(
            f"Cannot write {out}.", f"There is no folder {out.parent}.", f"mkdir -p {out.parent} && {typed}"
        )
    if out.exists() and not force:
        raise SettingsError(f"{out} exists.", "An existing file is overwritten only with --force.", f"{typed} --force")
    if ranks < 1:
        raise SettingsError(f"--ranks {ranks} is not possible.", "At least one process is needed.", typed)
