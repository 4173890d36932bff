"""Values from a script's class, an earlier run, a settings file and `--set`, resolved into one settings object.

A later source overrides an earlier one: class defaults, then the resumed run's settings.toml, then the settings file,
then `--set`. Every value keeps its source, and all problems are collected and reported together.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from unisono.config.command_line import CommandLine, merge_corrections
from unisono.config.entries import (
    SettingEntry,
    build,
    entries_of,
    example_of,
    example_value,
    fields_of,
    is_section,
    library_settings,
)
from unisono.config.toml_file import read, read_values
from unisono.config.value_types import ValueMismatch, choices_of, kind, shown, toml, typed
from unisono.config.wording import nearest_name
from unisono.errors import Problem, SettingsError
from unisono.security.masking import is_masked, masked

T = TypeVar("T")

NOT_GIVEN = ("default", "script")
"""Sources of values that the request did not give."""

CLASS_DEFAULT, EARLIER_RUN, SETTINGS_FILE, COMMAND_LINE = range(4)
"""Precedence of sources; a larger number overrides a smaller one."""


class LoadedSettings(NamedTuple, Generic[T]):
    """Settings, and the source of every value by dotted name: default, script, a file's path, or --set."""

    settings: T
    sources: dict[str, str]


def load(
    cls: type[T],
    *,
    file: Path | None = None,
    sets: Sequence[str] = (),
    earlier: Path | None = None,
    line: CommandLine = CommandLine(),  # noqa: B008  (frozen)
) -> LoadedSettings[T]:
    """Return the settings that class, earlier run, file and `--set key=value` make together.

    Args:
        cls: the script's settings class.
        file: a settings file.
        sets: assignments as typed after `--set`.
        earlier: the settings.toml of the resumed run; values given to it override the script's defaults.
        line: the typed command, for messages.

    Raises:
        SettingsError: with everything that is wrong.
    """
    gathered = gather(cls, file=file, sets=sets, earlier=earlier, line=line)
    if gathered.problems:
        raise SettingsError.of(merge_corrections(gathered.problems, line))
    return gathered.build()


def gather(
    cls: type[T],
    *,
    file: Path | None = None,
    sets: Sequence[str] = (),
    earlier: Path | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    allow_unknown: bool = False,
    line: CommandLine = CommandLine(),  # noqa: B008  (frozen)
) -> SettingsSources[T]:
    """Do the same as `load`, but keep problems, so that the caller can look for more before it reports them.

    Args:
        defaults: values that override the defaults of the class, because a script's own class has them.
        allow_unknown: ignore names that the class does not have, because the script's own class may have them.
    """
    _refuse_lost_fields(cls)
    entries = {entry.name: entry for entry in entries_of(cls)}
    for name, value in defaults.items():
        entries[name] = entries[name]._replace(default=value, source="script")
    gathered = SettingsSources(cls, entries, line)
    if earlier is not None:
        gathered.take_earlier(earlier)
    if file is not None:
        gathered.take_file(file, allow_unknown)
    gathered.take_sets(sets, allow_unknown)
    gathered.resolve()
    return gathered


def _refuse_lost_fields(cls: type) -> None:
    """Raise SettingsError for assignments in the class body that dataclasses ignore."""
    if "__dataclass_fields__" not in cls.__dict__:
        true = "Its base class is, so the fields of the class itself would be ignored."
        do = f"Write @dataclass(frozen=True, kw_only=True) above class {cls.__name__}."
        raise SettingsError(f"Class {cls.__name__} is not a dataclass.", true, do)
    for f, hint, default in fields_of(cls):
        if is_section(hint):
            _refuse_lost_fields(hint)
        lost = next((b for b in cls.__mro__ if f.name in vars(b) and f.name not in inspect.get_annotations(b)), None)
        if lost is not None:
            value = vars(lost)[f.name]
            error = f"{f.name} = {value!r} in class {cls.__name__} has no type annotation."
            true = f"Without one it is no field, and {f.name} stays {shown(default)}."
            raise SettingsError(error, true, f"Write {f.name}: {type(value).__name__} = {value!r} there.")


class SettingsSources(Generic[T]):
    """Values on their way to a settings object, and the problems found so far.

    Attributes:
        values: by dotted name.
        sources: the source of each value.
        problems: everything that is wrong so far.
        doubtful: settings that were given a value that is not valid, so that nothing can be concluded from them.
    """

    def __init__(self, cls: type[T], entries: Mapping[str, SettingEntry], line: CommandLine) -> None:
        self.cls, self.entries, self.line = cls, entries, line
        self.values = {name: entry.default for name, entry in entries.items()}
        self.sources = {name: entry.source for name, entry in entries.items()}
        self.levels = dict.fromkeys(entries, CLASS_DEFAULT)
        self.problems: list[Problem] = []
        self.doubtful: set[str] = set()
        self._withheld: dict[str, str] = {}
        """Settings whose values a file does not contain, because they are secrets: the source of each."""

    def take_earlier(self, file: Path) -> None:
        """Take the values that were given to the resumed run. Names that the script no longer has are ignored here."""
        try:
            values, sources = read(file)
        except SettingsError as error:
            do = f"rm {file}; then, with --set for all settings that the run was given: {self.line}"
            true = f"{error.problems[0].error} {error.problems[0].facts}"
            self.problems.append(Problem("Cannot resume without the run's settings.", true, do))
            return
        for name, source in sources.items():
            if source not in NOT_GIVEN and name in self.entries and name in values:
                entry, value = self.entries[name], "none" if values[name] is None else values[name]
                if is_masked(value):
                    self._withheld[name] = source
                    continue
                try:
                    self.values[name] = typed(entry.hint, value)  # "none" may be one of a Literal's choices
                except ValueMismatch as mismatch:
                    invalid = f"Invalid value: {name} = {toml(value)} in {file}"
                    do = str(self.line.setting(f"{name}={example_of(entry)}"))
                    self._doubt(name, Problem(invalid, f"{name} takes {mismatch}.", do))
                else:
                    self.sources[name], self.levels[name] = source, EARLIER_RUN

    def take_file(self, file: Path, allow_unknown: bool) -> None:
        """Take the values of a settings file."""
        try:
            given = read_values(file, self.line)
        except SettingsError as error:
            self.problems += error.problems
            return
        sources = read(file)[1]  # if it is the settings.toml of a run
        for name, value in given.items():
            if is_masked(value) and name in self.entries:
                if sources.get(name) not in NOT_GIVEN:
                    self._withheld[name] = str(file)
            elif name in self.entries or not allow_unknown:
                self._put(name, value, str(file), SETTINGS_FILE)

    def take_sets(self, sets: Sequence[str], allow_unknown: bool) -> None:
        """Take the values of `--set key=value`."""
        for assignment in sets:
            name, equals, text = (part.strip() for part in assignment.partition("="))
            if equals and (name in self.entries or not allow_unknown):
                self._put(name, text, "--set", COMMAND_LINE)
            elif not equals:
                entry = self.entries[nearest_name(name, self.entries) or "steps"]
                do = str(self.line.setting(f"{entry.name}={example_of(entry)}", instead_of=assignment))
                self._doubt(entry.name, Problem(f"--set {assignment} has no value.", "--set takes key=value.", do))

    def resolve(self) -> None:
        """Check the script's defaults, and apply what follows from several sources together."""
        for name, entry in self.entries.items():
            if self.levels[name] == CLASS_DEFAULT and name not in self.doubtful:
                self._check_default(entry)
        for name, source in self._withheld.items():
            if self.levels[name] == CLASS_DEFAULT:
                facts = f"It is a secret, which {source} gave to the run, so settings.toml has *** in its place."
                self._doubt(name, Problem(f"{name} is not stored.", facts, str(self.line.setting(f"{name}=VALUE"))))
        levels, values = self.levels, self.values
        for one, other in (("steps", "epochs"), ("epochs", "steps")):  # the later source of the two counts
            if values.get(one) is not None and levels[one] > levels[other]:
                values[other], self.sources[other] = None, self.sources[one]
        # Eight virtual ranks are only a default: a smaller batch has one per sample.
        batch = values["batch"]
        if self.sources["virtual_ranks"] == "default" and isinstance(batch, int) and batch >= 1:
            values["virtual_ranks"] = min(batch, values["virtual_ranks"])

    def build(self) -> LoadedSettings[T]:
        """Return the settings object.

        Raises:
            SettingsError: if the class itself refuses a value.
        """
        try:
            return LoadedSettings(build(self.cls, self.values), self.sources)
        except (ValueError, TypeError) as error:  # the class checks its own values in __post_init__
            true = f"{type(error).__name__}: {error}"
            do = f"{self.line.setting('NAME=VALUE')}, with another value for the setting that it names."
            raise SettingsError(f"Class {self.cls.__name__} refuses these settings.", true, do) from error

    def _put(self, name: str, value: Any, source: str, level: int) -> None:
        """Add one value of a file or the command line, or the problem with it."""
        text = level == COMMAND_LINE
        shown_value = masked(name, value)
        given = f"{name} = {shown_value}" if text else f"{name} = {toml(shown_value)} in {source}"
        assignment = f"{name}={value}"

        def instead(name: str, value: Any = "VALUE") -> str:
            if text:
                return str(self.line.setting(f"{name}={value}", instead_of=assignment))
            return f"Write in {source}: {name} = {value}"

        if name in self.entries:
            entry = self.entries[name]
            try:
                self.values[name] = typed(entry.hint, value, text=text)
            except ValueMismatch as mismatch:
                near = difflib.get_close_matches(str(value), [shown(choice) for choice in choices_of(entry.hint)], 1)
                example = near[0] if near else example_value(entry)
                do = instead(name, shown(example) if text else toml(example))
                self._doubt(name, Problem(f"Invalid value: {given}", f"{name} takes {mismatch}.", do))
            else:
                self.sources[name], self.levels[name] = source, level
            return
        inside = [other for other in self.entries if other.startswith(name + ".")]
        nearest = nearest_name(name, self.entries)
        error = f"There is no setting {name}." if text else f"There is no setting {name}, which {source} sets."
        if inside:
            error = f"{name} is a section, not a setting." if text else f"{given} sets a section."
            self.problems.append(Problem(error, f"It has the settings {', '.join(inside)}.", instead(inside[0])))
        elif nearest:
            true = f"The nearest name is {nearest}."
            self._doubt(nearest, Problem(error, true, instead(nearest, value if text else toml(value))))
        else:
            without = self.line.setting(instead_of=assignment)
            do = f"{without} (without it)" if text else f"Remove from {source} the line {name} = {toml(value)}"
            self.problems.append(Problem(error, self._list_settings(), do))

    def _list_settings(self) -> str:
        """Return the names of the script's own settings, and the command that lists the others."""
        own = [entry.name for entry in self.entries.values() if entry.source == "script"]
        command = self.line.help()
        if not command:
            return f"There are {', '.join([*own, *(name for name in self.entries if name not in own)])}."
        others = f"{len(self.entries) - len(own)} of every run: {command}"
        return f"There are {', '.join(own)}, and {others}" if own else f"There are {others}"

    def _check_default(self, entry: SettingEntry) -> None:
        """Report a default of the script that is missing, or of another type than its annotation."""
        if entry.default is MISSING:
            do = str(self.line.setting(f"{entry.name}={example_of(entry)}"))
            self._doubt(entry.name, Problem(f"{entry.name} has no default.", f"It takes {kind(entry.hint)}.", do))
            return
        try:
            typed(entry.hint, entry.default)
        except ValueMismatch as mismatch:
            error = f"Invalid default in the script: {entry.name} = {shown(entry.default)}"
            true = f"{entry.name} takes {mismatch}."
            own = entry.name not in library_settings()
            do = f"Change the default of {entry.name}{', or its type,' * own} in the script."
            self._doubt(entry.name, Problem(error, true, do))

    def _doubt(self, name: str, problem: Problem) -> None:
        self.problems.append(problem)
        self.doubtful.add(name)
