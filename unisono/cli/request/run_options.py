"""The flags of a run, the same for `unisono run`, the verbs that run a script, and a script itself.

`unisono run text --set steps=20 --resume` passes them to the script's processes, and `python text.py --set steps=20
--resume` reads the same ones.
"""

from __future__ import annotations

import json as json_
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import App, Group, Parameter

from unisono.cli.request.settings_help import description_of, settings_table
from unisono.cli.request.suggestions import parsed
from unisono.config import CommandLine, entries_of, nearest_name, size
from unisono.errors import Problem

WHAT = Group("Settings", sort_key=1)
WHERE = Group("Execution", sort_key=2)


@Parameter(name="*", negative=())
@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The flags of a run.

    Parameters
    ----------
    sets
        Set a value, as in --set batch=64 --set model.width=128. Overrides the settings file. Repeatable.
    settings_file
        Read settings from a TOML file, such as the settings.toml of a run.
    resume
        Continue from the newest complete checkpoint.
    autoresume
        Continue if --run-dir holds a run, otherwise start a new run: for job managers that repeat the same command.
    accept_change
        Resume although this field differs from the run. Bits change from here on, and result.json says so.
    run_dir
        The folder for logs, checkpoints and results. By default runs/NAME-TIME; with --resume the newest of these.
    json
        Print the result, or the error, as JSON on the last line.
    """

    sets: Annotated[tuple[str, ...], Parameter(name="--set", metavar="KEY=VALUE", show_default=False, group=WHAT)] = ()
    settings_file: Annotated[Path | None, Parameter(name="--settings", metavar="FILE", group=WHAT)] = None
    resume: Annotated[bool, Parameter(show_default=False, group=WHAT)] = False
    autoresume: Annotated[bool, Parameter(show_default=False, group=WHAT)] = False
    accept_change: Annotated[tuple[str, ...], Parameter(metavar="FIELD", show_default=False, group=WHAT)] = ()
    run_dir: Annotated[Path | None, Parameter(metavar="DIR", group=WHERE)] = None
    json: Annotated[bool, Parameter(show_default=False, group=WHERE)] = False
    trace: Annotated[str, Parameter(show=False)] = ""  # [KIND:]ARGUMENTS, for verbs that inspect a run
    faults: Annotated[tuple[str, ...], Parameter(name="--fault", show=False)] = ()  # as in testing/fault_spec.py
    describe: Annotated[Path | None, Parameter(show=False)] = None  # the file for a report on the script's settings
    typed: Annotated[str, Parameter(show=False)] = ""  # the command as the user typed it, for messages
    own: Annotated[tuple[str, ...], Parameter(parse=False)] = ()  # the script's own arguments, after `--`
    no_arguments: Annotated[bool, Parameter(parse=False)] = False  # nothing after `--`: a resume keeps no arguments

    def arguments(self, run_dir: Path | None) -> list[str]:
        """Return these flags as a script's arguments, with this run directory."""
        flags = [f"--set={each}" for each in self.sets]
        flags += [f"--settings={self.settings_file}"] if self.settings_file is not None else []
        flags += ["--resume"] if self.resume else []
        flags += ["--autoresume"] if self.autoresume else []
        flags += [f"--accept-change={each}" for each in self.accept_change]
        flags += ["--json"] if self.json else []
        flags += [f"--trace={self.trace}"] if self.trace else []
        flags += [f"--fault={each}" for each in self.faults]
        flags += [f"--describe={self.describe}"] if self.describe is not None else []
        flags += [f"--typed={self.typed}"] if self.typed else []
        flags += [f"--run-dir={run_dir}"] if run_dir is not None else []
        return [*flags, *self._after_flags()]

    def line(self, *command: str) -> CommandLine:
        """Return these flags after a command, for messages that propose a changed command."""
        words = [word for each in self.sets for word in ("--set", each)]
        words += ["--settings", str(self.settings_file)] if self.settings_file is not None else []
        words += ["--run-dir", str(self.run_dir)] if self.run_dir is not None else []
        words += ["--resume"] if self.resume else []
        words += ["--autoresume"] if self.autoresume else []
        words += [word for each in self.accept_change for word in ("--accept-change", each)]
        words += ["--json"] if self.json else []
        return CommandLine((*command, *words, *self._after_flags()))

    def _after_flags(self) -> list[str]:
        return ["--", *self.own] if self.own or self.no_arguments else []

    def with_own(self, words: Sequence[str], own: Sequence[str]) -> RunRequest:
        """Return the request with the script's own arguments.

        Args:
            words: all words of the command line.
            own: the words after the first `--`.
        """
        return replace(self, own=tuple(own), no_arguments="--" in words and not own)

    def plan_line(self, target: str, ranks: int, memory: float) -> CommandLine:
        """Return the command that plans a run within some bytes of memory of a process, for messages."""
        words = ["--ranks", str(ranks)] if ranks > 1 else []
        plain = replace(self, run_dir=None, resume=False, autoresume=False, accept_change=(), json=False)
        return plain.line("unisono", "plan", target, *words, "--memory", size(memory).replace(" ", ""))

    def earlier(self, run_dir: Path | None) -> Path | None:
        """Return the settings.toml of the resumed run; None without a resume, or if the run never wrote it."""
        file = run_dir / "settings.toml" if self.resume and run_dir is not None else None
        return file if file is not None and file.is_file() else None

    def problems_of_accepted(self, known: Collection[str], line: CommandLine) -> list[Problem]:
        """Return what is wrong with --accept-change. `known` are the fields that results depend on; (): not known."""
        if self.accept_change and not self.resume:
            facts = "Only a resumed run can differ from an earlier one."
            return [Problem("--accept-change has no effect without --resume.", facts, str(line.flag("--resume")))]
        problems = []
        for name in self.accept_change:
            if name in known or not known:
                continue
            near = nearest_name(name, known)
            facts, do = f"The nearest name is {near}.", str(line.flag("--accept-change", near or "", name))
            if near is None:
                facts = f"Results depend on {', '.join(sorted(known))}."
                do = f"{line.without('--accept-change', name)} (without it)"
            problems.append(Problem(f"Results depend on no field {name}.", facts, do))
        return problems

    def problems_of_faults(self, line: CommandLine) -> list[Problem]:
        """Return what is wrong with the injected faults."""
        if not self.faults:
            return []
        from unisono.testing.fault_spec import fault_of  # with torch

        problems = []
        for text in self.faults:
            try:
                fault_of(text)
            except ValueError as error:
                facts = f"{str(error)[:1].upper()}{str(error)[1:]}."
                do = str(line.flag("--fault", "FailAt step=2 phase=backward"))
                problems.append(Problem(f"Invalid value for --fault: {text}", facts, do))
        return problems

    @classmethod
    def parse(cls, argv: Sequence[str], settings: type, script: str) -> RunRequest:
        """Parse the arguments of a script.

        Args:
            argv: the arguments, without the script itself.
            settings: the script's settings class.
            script: the script's name.

        Raises:
            SystemExit: after `--help` is printed.
            SettingsError: if the arguments cannot be parsed.
        """
        flags, own = split(argv)
        command = ("python", script)
        app = App(
            name=" ".join(command),
            help=_first_line_of(settings),
            help_format="plaintext",
            help_epilogue=settings_table(settings),
            help_flags=["--help", "-h"],
            version_flags=[],
            default_parameter=Parameter(negative=()),
        )

        app.default(_itself)
        function, bound = parsed(app, command, flags, lambda: [entry.name for entry in entries_of(settings)])
        result = function(*bound.args, **bound.kwargs)
        if not isinstance(result, cls):
            raise SystemExit(0)  # the help was printed
        if result.describe is not None:
            result.describe.write_text(json_.dumps(description_of(settings)), encoding="utf-8")
        return result.with_own(argv, own)


def _itself(*, request: RunRequest = RunRequest()) -> RunRequest:
    return request


def _first_line_of(settings: type) -> str:
    """Return the first line of the class's docstring, or else of the module's."""
    text = settings.__doc__ or ""
    if text.startswith(f"{settings.__name__}("):  # dataclasses without a docstring get their signature as one
        text = sys.modules[settings.__module__].__doc__ or ""
    return text.strip().partition("\n")[0]


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags before the first `--`, and the script's own arguments after it."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]
