"""Everything that is wrong with a request for a run, found before training starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from unisono.config.command_line import CommandLine, merge_corrections
from unisono.config.conflicts import conflicts_among
from unisono.config.entries import SettingEntry, entries_of, example_of, flatten
from unisono.config.exchange_registry import DIVIDING_AXES
from unisono.config.mesh_shape import MeshShape
from unisono.config.resolve import NOT_GIVEN, LoadedSettings, SettingsSources
from unisono.config.schema import ParallelSettings, Settings
from unisono.config.validate_sizes import WITH_MESH, WITHOUT_MESH, choose_mesh
from unisono.config.value_types import ValueMismatch, shown, typed
from unisono.errors import Problem, SettingsError
from unisono.profiles.profiled_steps import profile_problems
from unisono.trackers.registry import tracker_problems


class ValidatedSettings(NamedTuple):
    """The settings, None if they cannot be built, and everything that is wrong with them."""

    loaded: LoadedSettings[Any] | None
    problems: list[Problem]


def examine(gathered: SettingsSources[Any], size: int, *, only_given: bool = False) -> ValidatedSettings:
    """Validate gathered settings for `size` processes. Problems that only follow from another one are left out.

    Args:
        gathered: values and sources.
        size: the number of processes.
        only_given: consider only values that the request gives, because the script's defaults are not known.
    """
    try:
        loaded = gathered.build()
    except SettingsError as error:
        return ValidatedSettings(None, gathered.problems or list(error.problems))
    not_given = {name for name, source in gathered.sources.items() if only_given and source in NOT_GIVEN}
    unknown = gathered.doubtful | not_given
    problems = [*gathered.problems, *check(loaded.settings, size, gathered.line, unknown)]
    return ValidatedSettings(loaded, merge_corrections(problems, gathered.line))


def check(settings: Any, size: int, line: CommandLine, unknown: Collection[str] = ()) -> list[Problem]:
    """Return everything that is wrong with these settings for `size` processes.

    Args:
        settings: the settings object.
        size: the number of processes.
        line: the typed command, for messages.
        unknown: names of settings whose values are not considered.
    """
    entries = [entry for entry in entries_of(type(settings), settings) if entry.name not in unknown]
    problems = [problem for entry in entries if (problem := _wrong_type(entry, line))]
    if problems:
        return problems  # comparing values of the wrong type would only raise
    values = {name: value for name, value in flatten(settings).items() if name not in unknown}
    axes, wrong = choose_mesh(values, size, line)
    defaults = {entry.name: entry.default for entry in entries_of(type(settings))}
    problems += [problem for entry in entries if (problem := _out_of_range(entry, defaults[entry.name], line))]
    found = _with_mesh(values, axes)
    problems += [conflict.problem(found, line) for conflict in conflicts_among(found)]
    problems += [problem for rule in WITHOUT_MESH for problem in rule(values, line)]
    problems += tracker_problems(values.get("track", ""), lambda text: str(line.setting(text)))
    problems += profile_problems(values, size, lambda text: str(line.setting(text)))
    problems += _missing_exporter(values.get("metrics.port", 0))
    problems += wrong or [problem for rule in WITH_MESH for problem in rule(values, axes, line)]
    return problems


def _missing_exporter(port: int) -> list[Problem]:
    """Return a problem if metrics are wanted, and the package that serves them is not installed."""
    if not port or find_spec("prometheus_client") is not None:
        return []
    facts = "It is not installed."
    return [Problem(f"metrics.port = {port} needs the package prometheus-client.", facts, INSTALL_METRICS)]


INSTALL_METRICS = "pip install 'unisono[metrics]'"


def needs_dry_run(settings: Settings) -> bool:
    """Return whether only the script's model can show that these settings are possible."""
    return settings.parallel != ParallelSettings() or settings.compress.kind != "none"


def _with_mesh(values: Mapping[str, Any], axes: MeshShape) -> dict[str, Any]:
    """Return the settings with the sizes of dividing axes that the processes form: 2, say, for -1."""
    sizes = {f"parallel.{axis}": max(getattr(axes, axis), values.get(f"parallel.{axis}", 1)) for axis in DIVIDING_AXES}
    return {**values, **{name: size for name, size in sizes.items() if name in values or size > 1}}


def _wrong_type(entry: SettingEntry, line: CommandLine) -> Problem | None:
    try:
        typed(entry.hint, entry.default)
    except ValueMismatch as mismatch:
        do = str(line.setting(f"{entry.name}={example_of(entry)}"))
        return Problem(f"Invalid value: {entry.name} = {shown(entry.default)}", f"{entry.name} takes {mismatch}.", do)
    return None


def _out_of_range(entry: SettingEntry, default: Any, line: CommandLine) -> Problem | None:
    """Return the problem with a value. It proposes the script's default if the value is too small, else the limit."""
    limits, value = entry.limits, entry.default
    if limits is None or value is None or value in limits:
        return None
    must, bound = limits.violated(value)
    usual = isinstance(default, int | float) and value < default and default in limits
    dos = [
        str(line.setting(f"{entry.name}={shown(each)}")) for each in limits.instead or (default if usual else bound,)
    ]
    return Problem(f"{entry.name} = {shown(value)} is out of range.", f"It must be {must}.", ", or: ".join(dos))
