"""unisono copy: copy a recipe, to change it."""

from __future__ import annotations

import json as json_
import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from unisono.cli.request.target import recipe_of
from unisono.errors import SettingsError


def copy(
    recipe: str,
    dest: Path | None = None,
    /,
    *,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
) -> int:
    """Copy a recipe, to change it.

    Parameters
    ----------
    recipe
        The name of a recipe.
    dest
        The new file, or a folder for it; by default the working directory. Existing files are not overwritten.
    json
        Print the path of the new file as JSON.
    """
    source = recipe_of(recipe)
    path = Path(source.name) if dest is None else dest / source.name if dest.is_dir() else dest
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        do = shlex.join(["unisono", "copy", recipe, str(path.with_name(f"my_{path.name}"))])
        raise SettingsError(f"{path} exists.", "Existing files are not overwritten.", do) from None
    except OSError as error:
        do = f"unisono copy {recipe} {Path.home() / source.name}, or another writable path"
        raise SettingsError(f"Cannot write {path}.", f"{error.strerror}.", do) from None
    print(json_.dumps({"path": str(path)}) if json else f"Copied to {path}. Next: unisono run {path}")
    return 0
