"""The settings of a run: frozen, keyword-only dataclasses, and the one way in.

A script's own class adds fields and changes defaults; a TOML file overrides the script, and `--set key=value` overrides
the file. Every value remembers where it came from, and every problem is told at once, before any process starts.

    @dataclass(frozen=True, kw_only=True)
    class Settings(unisono.Settings):
        batch: int = 64
        lr: float = 3e-4
        model: Model = Model()                        # a dataclass of its own: model.width, model.depth

    loaded = load(Settings, file=Path("small.toml"), sets=["model.width=64", "steps=20"])
    loaded.settings.model.width, loaded.sources["model.width"]              # 64, "--set"

A value is a number, true or false, text, a path, one of a Literal's or Enum's choices, a list of these, or none: what a
line of TOML can say. TOML has no word for None, so the text "none" stands for it wherever None is allowed.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeGuard, TypeVar, get_type_hints

from unisono.config.command_line import CommandLine
from unisono.config.schema import (
    SECTIONS,
    SETTING_INFO,
    BalanceSettings,
    CheckpointSettings,
    CompressSettings,
    DdpSettings,
    DivergenceSettings,
    LoaderSettings,
    LocalSGDSettings,
    ParallelSettings,
    PromiseSettings,
    ServerSettings,
    SettingInfo,
    Settings,
    WatchdogSettings,
)
from unisono.config.static_settings import settings_of
from unisono.config.toml_file import lines_of
from unisono.config.value_types import ValueMismatch, choices_of, kind, plain, shown, toml, typed, within
from unisono.config.wording import nearest_name, plural, size
from unisono.errors import Problem, SettingsError

__all__ = [
    "CheckpointSettings",
    "CompressSettings",
    "DdpSettings",
    "BalanceSettings",
    "DivergenceSettings",
    "LoaderSettings",
    "LocalSGDSettings",
    "ParallelSettings",
    "PromiseSettings",
    "ServerSettings",
    "Settings",
    "WatchdogSettings",
    "LoadedSettings",
    "SettingEntry",
    "CommandLine",
    "SettingsSources",
    "load",
    "gather",
    "ENVIRONMENT",
    "flatten",
    "result_settings",
    "provenance_lines",
    "read",
    "entries_of",
    "nearest_name",
    "settings_of",
    "kind",
    "plain",
    "shown",
    "size",
    "toml",
    "plural",
]


ENVIRONMENT = ("torch", "numpy", "device", "processor", "instruction_set", "threads")
"""What is no setting but bits depend on it (docs/design/decisions/alignment.md); `threads` is both."""

UNASKED = ("default", "script")  # sources of values that nobody asked for on this run

T = TypeVar("T")


class LoadedSettings(NamedTuple, Generic[T]):
    """Settings, and for every dotted name where its value came from: default, script, the file's path, or --set."""

    settings: T
    sources: dict[str, str]


class SettingEntry(NamedTuple):
    """One setting that a class has."""

    name: str  # dotted, as in model.width
    hint: Any  # its type
    default: Any  # MISSING where the script gives none
    source: str  # default: ours; script: the script's
    mathematics: bool
    meaning: str


def load(
    cls: type[T],
    *,
    file: Path | None = None,
    sets: Sequence[str] = (),
    earlier: Path | None = None,
    line: CommandLine = CommandLine(),  # noqa: B008  (frozen)
) -> LoadedSettings[T]:
    """What class, earlier run, file and `--set key=value` make together. Raises SettingsError with all that is wrong.

    earlier  the settings.toml of the run that is resumed: what it was given counts more than what the script says
    line     what was typed, for the messages
    """
    gathered = gather(cls, file=file, sets=sets, earlier=earlier, line=line)
    if gathered.problems:
        raise SettingsError.of(gathered.problems)
    return gathered.build()


def gather(
    cls: type[T],
    *,
    file: Path | None = None,
    sets: Sequence[str] = (),
    earlier: Path | None = None,
    strangers: bool = False,
    line: CommandLine = CommandLine(),  # noqa: B008  (frozen)
) -> SettingsSources[T]:
    """The same, but problems are kept, so that more can be looked at before they are told.

    strangers  pass over names that the class does not have: somebody else knows them
    """
    _refuse_lost_fields(cls)
    gathered = SettingsSources(cls, {entry.name: entry for entry in entries_of(cls)}, line)
    if earlier is not None:
        gathered.take_earlier(earlier)
    if file is not None:
        gathered.take_file(file, strangers)
    gathered.take_sets(sets, strangers)
    gathered.settle()
    return gathered


def _refuse_lost_fields(cls: type) -> None:
    """What a class says and dataclasses do not see."""
    asked = f"The settings of class {cls.__name__}"
    if "__dataclass_fields__" not in cls.__dict__:
        true = "It is not a dataclass itself, so its own fields would be lost."
        raise SettingsError(asked, true, f"Write @dataclass(frozen=True, kw_only=True) above class {cls.__name__}.")
    for f, hint, default in _fields(cls):
        if _is_section(hint):
            _refuse_lost_fields(hint)
        lost = next((b for b in cls.__mro__ if f.name in vars(b) and f.name not in inspect.get_annotations(b)), None)
        if lost is not None:
            value = vars(lost)[f.name]
            true = f"{f.name} = {value!r} has no type in it, so it is no field, and {f.name} stays {shown(default)}."
            raise SettingsError(asked, true, f"Write {f.name}: {type(value).__name__} = {value!r} there.")


SCRIPTS, EARLIER, FILE, TYPED = range(4)
"""Where a value may come from; a later one counts more."""


class SettingsSources(Generic[T]):
    """Values on their way to a settings object, and what is wrong with them so far."""

    def __init__(self, cls: type[T], entries: Mapping[str, SettingEntry], line: CommandLine) -> None:
        self.cls, self.entries, self.line = cls, entries, line
        self._mended = line  # what was typed, with all of it mended
        self.values = {name: entry.default for name, entry in entries.items()}
        self.sources = {name: entry.source for name, entry in entries.items()}
        self.levels = dict.fromkeys(entries, SCRIPTS)
        self.problems: list[Problem] = []
        self.doubtful: set[str] = set()
        """Settings that were to have another value, which was not understood."""

    def take_earlier(self, file: Path) -> None:
        """What an earlier run was given; what the script has no more is for the comparison of old and new to tell."""
        try:
            values, sources = read(file)
        except SettingsError as error:
            do = f"rm {file}; then, with a --set for all that the run was given: {self.line}"
            self.problems.append(Problem(f"Resume with what {file} says.", error.problems[0].true, do))
            return
        for name, source in sources.items():
            if source not in UNASKED and name in self.entries and name in values:
                entry, value = self.entries[name], "none" if values[name] is None else values[name]
                try:
                    self.values[name] = typed(entry.hint, value)  # "none" may be one of a Literal's choices
                except ValueMismatch as misfit:
                    asked = f"{name} = {toml(value)} in {file}"
                    do = str(self.line.setting(f"{name}={example_of(entry)}"))
                    self._doubt(name, Problem(asked, f"{name} takes {misfit}.", do))
                else:
                    self.sources[name], self.levels[name] = source, EARLIER

    def take_file(self, file: Path, strangers: bool) -> None:
        try:
            given = lines_of(file, self.line)
        except SettingsError as error:
            self.problems += error.problems
            return
        for name, value in given.items():
            if name in self.entries or not strangers:
                self._put(name, value, str(file), FILE)

    def take_sets(self, sets: Sequence[str], strangers: bool) -> None:
        known, self._mended = len(self.problems), self.line
        self._take_sets(sets, strangers)
        if len(self.problems) > known + 1:  # told again, each with the line that mends them all
            self.line = self._mended
            del self.problems[known:]
            self._take_sets(sets, strangers)

    def _take_sets(self, sets: Sequence[str], strangers: bool) -> None:
        for request in sets:
            name, equals, text = (part.strip() for part in request.partition("="))
            if equals and (name in self.entries or not strangers):
                self._put(name, text, "--set", TYPED)
            elif not equals:
                entry = self.entries[nearest_name(name, self.entries) or "steps"]
                do = self._mend(f"{entry.name}={example_of(entry)}", instead_of=request)
                self._doubt(entry.name, Problem(f"--set {request}", "--set takes key=value.", do))

    def settle(self) -> None:
        """What follows from all of them together."""
        for name, entry in self.entries.items():
            if self.levels[name] == SCRIPTS and name not in self.doubtful:
                self._check_default(entry)
        levels, values = self.levels, self.values
        for one, other in (("steps", "epochs"), ("epochs", "steps")):  # who asks later takes back the other
            if values.get(one) is not None and levels[one] > levels[other]:
                values[other], self.sources[other] = None, self.sources[one]
        # Eight virtual ranks are a default, not a wish: a small batch has fewer shares.
        batch = values["batch"]
        if self.sources["virtual_ranks"] == "default" and isinstance(batch, int) and batch >= 1:
            values["virtual_ranks"] = min(batch, values["virtual_ranks"])

    def build(self) -> LoadedSettings[T]:
        """The settings object. Raises SettingsError where the class itself refuses a value."""
        try:
            return LoadedSettings(_build(self.cls, self.values), self.sources)
        except (ValueError, TypeError) as error:  # the class checks its own values when it is made
            true = f"{type(error).__name__}: {error}"
            do = f"{self.line.setting('NAME=VALUE')}, with another value for what it names."
            raise SettingsError(f"The settings of {self.cls.__name__}", true, do) from error

    def _put(self, name: str, value: Any, source: str, level: int) -> None:
        """One value from a file or the command line, into values and sources or into problems."""
        text = level == TYPED
        asked = f"--set {name}={value}" if text else f"{name} = {toml(value)} in {source}"

        def instead(name: str, value: Any = "VALUE") -> str:
            if text:
                return self._mend(f"{name}={value}", instead_of=asked.removeprefix("--set "))
            return f"Write in {source}: {name} = {value}"

        if name in self.entries:
            entry = self.entries[name]
            try:
                self.values[name] = typed(entry.hint, value, text=text)
            except ValueMismatch as misfit:
                near = difflib.get_close_matches(str(value), [shown(choice) for choice in choices_of(entry.hint)], 1)
                example = near[0] if near else _example(entry)
                do = instead(name, shown(example) if text else toml(example))
                self._doubt(name, Problem(asked, f"{name} takes {misfit}.", do))
            else:
                self.sources[name], self.levels[name] = source, level
            return
        inside = [other for other in self.entries if other.startswith(name + ".")]
        nearest = nearest_name(name, self.entries)
        if inside:
            true = f"{name} is a section: it has {', '.join(inside)}."
            self.problems.append(Problem(asked, true, instead(inside[0])))
        elif nearest:
            true = f"There is no setting {name}; the nearest is {nearest}."
            self._doubt(nearest, Problem(asked, true, instead(nearest, value if text else toml(value))))
        else:
            true = f"There is no setting {name}. {self._what_there_is()}"
            without = self._mend(instead_of=f"{name}={value}") if text else ""
            do = f"{without} (without it)" if text else f"Remove from {source} the line {name} = {toml(value)}"
            self.problems.append(Problem(asked, true, do))

    def _what_there_is(self) -> str:
        """The script's own settings, and where the others are told."""
        own = [entry.name for entry in self.entries.values() if entry.source == "script"]
        told = self.line.help()
        if not told:
            return f"There are {', '.join([*own, *(name for name in self.entries if name not in own)])}."
        others = f"{len(self.entries) - len(own)} of every run: {told}"
        return f"There are {', '.join(own)}, and {others}" if own else f"There are {others}"

    def _mend(self, *pair: str, instead_of: str) -> str:
        """The line to type."""
        self._mended = self._mended.setting(*pair, instead_of=instead_of)
        return str(self.line.setting(*pair, instead_of=instead_of))

    def _check_default(self, entry: SettingEntry) -> None:
        """The script's own default may be missing, or of another type than its annotation says."""
        if entry.default is MISSING:
            do = str(self.line.setting(f"{entry.name}={example_of(entry)}"))
            self._doubt(entry.name, Problem(f"{entry.name} has no default", f"It takes {kind(entry.hint)}.", do))
            return
        try:
            typed(entry.hint, entry.default)
        except ValueMismatch as misfit:
            asked = f"{entry.name} = {shown(entry.default)} in the script"
            if entry.name in SETTING_INFO:
                true, do = f"It takes {misfit}.", f"Change the default of {entry.name} in the script."
            else:
                true = f"Its type says that it takes {misfit}."
                do = f"Change the default of {entry.name}, or its type, in the script."
            self._doubt(entry.name, Problem(asked, true, do))

    def _doubt(self, name: str, problem: Problem) -> None:
        self.problems.append(problem)
        self.doubtful.add(name)


def flatten(settings: Any) -> dict[str, Any]:
    """Every value by its dotted name, in the order of the fields."""
    return {entry.name: entry.default for entry in entries_of(type(settings), settings)}


def result_settings(settings: Any) -> dict[str, Any]:
    """The values that the result depends on, as JSON can hold them (a path as text, a tuple as a list, an Enum's name).

    Everything a script adds is part of it, unless its field says `field(..., metadata={"mathematics": False})`.
    """
    return {e.name: plain(e.default) for e in entries_of(type(settings), settings) if e.mathematics}


def provenance_lines(settings: Any, sources: Mapping[str, str]) -> str:
    """TOML, one line a value with its source as a comment. It is a settings file too: `--settings` takes it."""
    lines = [(f"{name} = {toml(value)}", sources[name]) for name, value in flatten(settings).items()]
    width = min(40, max(len(line) for line, _ in lines))
    return "".join(f"{line:{width}}  # {source}\n" for line, source in lines)


def read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The values and sources that `explain` wrote to `path`, both by dotted name: what TOML holds, and for "none" None.

    Raises SettingsError where the file is not such a file.
    """
    values = {name: None if value == "none" else value for name, value in lines_of(path).items()}
    sources = {}
    for line in path.read_text(encoding="utf-8").split("\n"):
        assignment, mark, source = line.rpartition("  # ")  # the comment is last, whatever a text value contains
        if mark:
            sources[assignment.partition(" = ")[0]] = source.strip()
    return values, sources


def entries_of(cls: type, instance: Any = MISSING, prefix: str = "", source: str = "") -> Iterator[SettingEntry]:
    """Every setting of a class, sections unfolded, in order. With an instance its values stand in for the defaults."""
    for f, hint, default in _fields(cls, instance):
        name = prefix + f.name
        owner = next(base for base in cls.__mro__ if f.name in inspect.get_annotations(base))
        origin = source or ("default" if owner in SECTIONS else "script")
        if _is_section(hint):
            # A section that the script defines anew is the script's as a whole.
            yield from entries_of(hint, default, name + ".", "script" if origin == "script" else "")
        else:
            if name in SETTING_INFO and not within(hint, _hints()[name]):
                hint = _hints()[name]  # `precision: str` takes what precision takes
            about = SETTING_INFO.get(name) or SettingInfo(
                f.metadata.get("meaning", ""), f.metadata.get("mathematics", True)
            )
            yield SettingEntry(name, hint, default, origin, about.mathematics, about.meaning)


@cache
def _hints() -> dict[str, Any]:
    """The types of the settings that every run has."""

    def walk(cls: type, prefix: str) -> Iterator[tuple[str, Any]]:
        for f, hint, _ in _fields(cls):
            yield from walk(hint, f"{f.name}.") if _is_section(hint) else [(prefix + f.name, hint)]

    return dict(walk(Settings, ""))


def _fields(cls: type, instance: Any = MISSING) -> Iterator[tuple[Field[Any], Any, Any]]:
    """The fields that are settings: (field, type, value or default). A section's type is that of its default."""
    hints = get_type_hints(cls)
    for f in fields(cls):
        if not f.init:
            continue  # computed by the class itself
        value: Any = f.default
        factory: Any = f.default_factory
        if instance is not MISSING:
            value = getattr(instance, f.name)
        elif factory is not MISSING:
            value = factory()
        hint = hints[f.name]
        yield f, type(value) if _is_section(hint) and _is_section(type(value)) else hint, value


def _is_section(hint: Any) -> TypeGuard[type]:
    return isinstance(hint, type) and is_dataclass(hint)


def _build(cls: type[T], values: Mapping[str, Any], prefix: str = "", default: Any = MISSING) -> T:
    """An instance with these values."""
    arguments = {}
    for f, hint, value in _fields(cls, default):
        name = prefix + f.name
        arguments[f.name] = _build(hint, values, name + ".", value) if _is_section(hint) else values[name]
    return cls(**arguments)


def example_of(entry: SettingEntry) -> str:
    """A value that the setting would take, as one types it after `--set key=`."""
    return shown(_example(entry))


def _example(entry: SettingEntry) -> Any:
    for candidate in (entry.default, *choices_of(entry.hint), 1, 0.1, True, "text", [1, 2], ["a", "b"]):
        if candidate is not None and candidate is not MISSING:
            try:
                return typed(entry.hint, candidate)
            except ValueMismatch:
                continue
    return "VALUE"
