"""What one may ask of a run, on the command line of `unisono run` and of every script alike.

The flags are defined once, here. `unisono run text --set steps=20 --resume` hands them on to the script's processes,
and `python text.py --set steps=20 --resume` reads the same ones.
"""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import BoundArguments
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Group, Parameter, UnknownOptionError, UnusedCliTokensError

from unisono.errors import SettingsError
from unisono.settings import entries_of, kind, nearest_name, read, shown

WHAT = Group("What is computed", sort_key=1)
WHERE = Group("Where and how", sort_key=2)


@Parameter(name="*", negative=())
@dataclass(frozen=True, kw_only=True)
class Request:
    """The flags of a run.

    Parameters
    ----------
    sets
        Give a setting a value, as in --set batch=64 --set model.width=128. Comes last and wins.
    settings_file
        Read settings from a TOML file. A run's settings.toml is one.
    resume
        Go on from the newest complete checkpoint.
    accept_change
        Resume although this field differs from the run's. Its bits then end here, and the promise says so.
    run_dir
        The folder for everything the run leaves. By default runs/NAME-TIME, and with --resume the newest of these.
    json
        Print the result, or the error, as JSON on the last line.
    """

    sets: Annotated[tuple[str, ...], Parameter(name="--set", metavar="KEY=VALUE", show_default=False, group=WHAT)] = ()
    settings_file: Annotated[Path | None, Parameter(name="--settings", metavar="FILE", group=WHAT)] = None
    resume: Annotated[bool, Parameter(show_default=False, group=WHAT)] = False
    accept_change: Annotated[tuple[str, ...], Parameter(metavar="FIELD", show_default=False, group=WHAT)] = ()
    run_dir: Annotated[Path | None, Parameter(metavar="DIR", group=WHERE)] = None
    json: Annotated[bool, Parameter(show_default=False, group=WHERE)] = False
    own: Annotated[tuple[str, ...], Parameter(parse=False)] = ()  # what came after `--`: the script's own arguments

    def arguments(self, run_dir: Path) -> list[str]:
        """These flags for a script's command line, with the run directory that was chosen."""
        flags = [f"--set={each}" for each in self.sets]
        flags += [f"--settings={self.settings_file}"] if self.settings_file is not None else []
        flags += ["--resume"] if self.resume else []
        flags += [f"--accept-change={each}" for each in self.accept_change]
        flags += ["--json"] if self.json else []
        return [*flags, f"--run-dir={run_dir}", *(["--", *self.own] if self.own else [])]

    def sets_after(self, run_dir: Path | None) -> tuple[str, ...]:
        """All `--set`s of a resume: first what the run in `run_dir` was given by file or command line, then these.

        What a --settings file of this request says counts more than what the run was given.
        """
        file = run_dir / "settings.toml" if self.resume and run_dir is not None else None
        if file is None or not file.is_file():
            return self.sets
        values, sources = read(file)
        newer = read(self.settings_file)[0] if self.settings_file is not None else {}
        given = [name for name, source in sources.items() if source not in ("default", "script") and name not in newer]
        return (*(f"{name}={shown(values[name])}" for name in given), *self.sets)

    @classmethod
    def parse(cls, argv: Sequence[str], settings: type, script: str) -> Request:
        """What a script's own command line asks for (`argv` without the script itself).

        `--help` prints the flags and the settings, and leaves with SystemExit(0). Raises SettingsError for anything
        else that is not a request.
        """
        flags, own = split(argv)
        command = f"python {script}"
        app = App(
            name=command,
            help=_first_line_of(settings),
            help_format="plaintext",
            help_epilogue=table_of(settings),
            help_flags=["--help", "-h"],
            version_flags=[],
            default_parameter=Parameter(negative=()),
        )

        app.default(_itself)
        function, bound = parsed(app, flags, command, [entry.name for entry in entries_of(settings)])
        result = function(*bound.args, **bound.kwargs)
        if not isinstance(result, cls):
            raise SystemExit(0)  # the help was printed
        return replace(result, own=tuple(own))


def _itself(*, request: Request = Request()) -> Request:
    return request


def _first_line_of(settings: type) -> str:
    """What the script says about itself (a dataclass without a docstring has its signature for one)."""
    said = settings.__doc__ or ""
    if said.startswith(f"{settings.__name__}("):
        said = sys.modules[settings.__module__].__doc__ or ""
    return said.strip().partition("\n")[0]


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our flags, and what comes after the first `--`, which is the script's own business."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def parsed(
    app: App, flags: Sequence[str], command: str, names: Sequence[str]
) -> tuple[Callable[..., Any], BoundArguments]:
    """The function that these flags ask for, and its arguments. Raises SettingsError where they are not understood.

    `names` are the settings, for whoever writes --batch 64 instead of --set batch=64.
    """
    try:
        function, bound, _ = app.parse_args(list(flags), exit_on_error=False, print_error=False)
        return function, bound
    except UnknownOptionError as error:
        flag = error.token.keyword or error.token.value
        raise _unknown_flag(flag, list(flags), command, names, str(error)) from None
    except CycloptsError as error:
        verb = [word for word in flags[:1] if word in set(app)]
        line = shlex.join([*command.split(), *flags])
        do = " ".join([command, *verb, "--help"])
        if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
            more = shlex.join(error.unused_tokens)
            if verb != ["run"]:
                raise SettingsError(line, f"There is no place for `{more}`.", do) from None
            do = f"{line.removesuffix(more).rstrip()} -- {more}"
            raise SettingsError(line, f"`{more}` is for the script, and comes after --.", do) from None
        raise SettingsError(line, " ".join(str(error).split()), do) from None


def _unknown_flag(flag: str, flags: list[str], command: str, names: Sequence[str], said: str) -> SettingsError:
    """A setting written as a flag is the likely mistake: then we can say the whole line as it should be."""
    words = command.split()
    asked = shlex.join([*words, *flags])
    place = next((i for i, word in enumerate(flags) if word.partition("=")[0] == flag.partition("=")[0]), 0)
    name, equals, value = flags[place].lstrip("-").partition("=")
    after = flags[place + 1 :]
    if not equals and after and not after[0].startswith("--"):
        value, after = after[0], after[1:]
    near = difflib.get_close_matches(f"--{name}", FLAGS, 1, 0.75)
    if near == ["--ranks"] and words[0] == "python":
        line = ["unisono", "run", *words[1:], "--ranks", value or "N", *flags[:place], *after]
        return SettingsError(asked, "python starts one process; unisono run starts several.", shlex.join(line))
    if near:
        do = [near[0] + (f"={value}" if equals else ""), *([value] if value and not equals else [])]
        true = f"There is no flag --{name}; the nearest is {near[0]}."
        return SettingsError(asked, true, shlex.join([*words, *flags[:place], *do, *after]))
    setting = nearest_name(name.replace("-", "_"), names)
    if setting is not None:
        true = f"There is no flag --{name}, but a setting {setting}, and settings are given with --set."
        do = ["--set", f"{setting}={value or 'VALUE'}"]
        return SettingsError(asked, true, shlex.join([*words, *flags[:place], *do, *after]))
    verb = [word for word in flags[:1] if not word.startswith("-")]
    return SettingsError(asked, f"There is no flag --{name}.", shlex.join([*words, *verb, "--help"]))


FLAGS = ("--set", "--settings", "--resume", "--accept-change", "--run-dir", "--json", "--ranks", "--state", "--help")


def table_of(settings: type) -> str:
    """The settings with their defaults and meanings, a line each."""
    rows = [(entry.name, shown(entry.default), entry.meaning or kind(entry.hint)) for entry in entries_of(settings)]
    name_width = max(len(name) for name, _, _ in rows)
    value_width = min(10, max(len(value) for _, value, _ in rows))
    lines = [f"  {name:{name_width}} {value:{value_width}} {meaning}" for name, value, meaning in rows]
    return "\n".join(["Settings, their defaults and meanings; change one with --set name=value:", *lines])
