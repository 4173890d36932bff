"""Find the files of a data set that has one folder per class, as in words/yes/first.wav."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path

from unisono import DataError


def files_of(path: Path, kind: str, suffixes: Collection[str]) -> list[Path]:
    """Return a file, or the files of a folder and of those in it with these suffixes, sorted by name.

    Raises:
        DataError: There are none.
    """
    found = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.suffix.lower() in suffixes)
    if not found:
        raise DataError(
            f"There are no {kind} in {path}.",
            f"Their names end in {', '.join(sorted(suffixes))}.",
            "Name another folder.",
        )
    return found


def files_by_class(
    folder: Path, kind: str, suffixes: Collection[str], *, ignored: str = ".", hint: str = ""
) -> dict[str, list[Path]]:
    """Return the sorted files of each class, in the order of the classes' names.

    Args:
        folder: Has one subfolder per class.
        kind: The files' kind in error messages, as in "wave files".
        suffixes: The files' suffixes, in lower case, as in ".wav".
        ignored: A subfolder whose name begins with one of these characters is not a class.
        hint: Another sentence for the message about too few classes.

    Raises:
        DataError: There is no such folder, it has fewer than two classes, or a class has fewer than two files.
    """
    if not folder.is_dir():
        raise DataError(
            f"Cannot find {kind} in {folder}: {'it is a file' if folder.exists() else 'there is no such folder'}.",
            f"It must be a folder with one folder of {kind} per class. The current directory is {Path.cwd()}.",
            "--set data=FOLDER, or --set data=none for another data set.",
        )
    classes = [path for path in sorted(folder.iterdir()) if path.is_dir() and path.name[0] not in ignored]
    if len(classes) < 2:
        names = f" ({classes[0].name})" if classes else ""
        raise DataError(
            f"Cannot train on {folder}: it has fewer than two classes.",
            f"It has {len(classes)} folders of {kind}{names}, one per class. {hint}".rstrip(),
            f"mkdir {shlex.quote(str(folder / 'OTHER_CLASS'))}, and put its {kind} there.",
        )
    files = {path.name: _files(path, suffixes) for path in classes}
    incomplete = [path for path in classes if len(files[path.name]) < 2]
    if incomplete:
        raise _too_few_files(incomplete, len(files[incomplete[0].name]), kind)
    return files


def _files(folder: Path, suffixes: Collection[str]) -> list[Path]:
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name[0] != ".")
    return [path for path in paths if path.suffix.lower() in suffixes]


def _too_few_files(classes: list[Path], count: int, kind: str) -> DataError:
    folder = classes[0]
    others = f" {len(classes) - 1} other classes have too few as well." if len(classes) > 1 else ""
    remove = "rm -r" if any(folder.iterdir()) else "rmdir"
    return DataError(
        f"Cannot train on {folder}: the class has too few {kind}.",
        f"It has {count} {kind}, and needs two: for training and for validation.{others}",
        f"{remove} {shlex.quote(str(folder))}, or add {kind}.",
    )
