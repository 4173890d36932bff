"""What is wrong with a request for a run: all of it, before any process starts."""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import Any, NamedTuple

from unisono.config import (
    UNASKED,
    CommandLine,
    LoadedSettings,
    SettingEntry,
    SettingsSources,
    entries_of,
    example_of,
    flatten,
    plural,
    shown,
)
from unisono.config.mesh_shape import BESIDE_NO_PIPELINE, FILL, MeshShape, fill, fitting
from unisono.config.validate_audit import problems_of_audits
from unisono.config.validate_exchange import problems_of_exchange
from unisono.config.validate_parallel import problems_of_buddy, problems_of_ways
from unisono.config.validate_server import computing_processes
from unisono.config.value_types import ValueMismatch, typed
from unisono.errors import Problem, SettingsError


class ValidatedSettings(NamedTuple):
    """The settings, as far as they can be made, and everything that is wrong with them."""

    loaded: LoadedSettings[Any] | None
    problems: list[Problem]


def examine(gathered: SettingsSources[Any], size: int, *, only_given: bool = False) -> ValidatedSettings:
    """Look at gathered settings for `size` processes. What follows only from another problem is not told.

    only_given  the defaults are not the script's: only what was given counts
    """
    try:
        loaded = gathered.build()
    except SettingsError as error:
        return ValidatedSettings(None, gathered.problems or list(error.problems))
    unasked = {name for name, source in gathered.sources.items() if only_given and source in UNASKED}
    unknown = gathered.doubtful | unasked
    return ValidatedSettings(loaded, [*gathered.problems, *check(loaded.settings, size, gathered.line, unknown)])


def check(settings: Any, size: int, line: CommandLine, unknown: Collection[str] = ()) -> list[Problem]:
    """Everything that is wrong with these settings for `size` processes.

    line     what was typed, for the messages
    unknown  names of settings whose values do not count
    """
    entries = [entry for entry in entries_of(type(settings), settings) if entry.name not in unknown]
    problems = [problem for entry in entries if (problem := _misfit(entry, line))]
    if problems:
        return problems  # comparing values of the wrong type would only raise
    values = {name: value for name, value in flatten(settings).items() if name not in unknown}
    problems += _out_of_limits(values, line)
    problems += _without_one_end(values, line)
    problems += problems_of_ways(values, line)

    ranks, batch = values.get("virtual_ranks"), values.get("batch")
    if ranks is not None and batch is not None and ranks > batch >= 1:
        true = f"A batch of {batch} has {batch} samples, so at most {batch} shares."
        do = f"{line.setting(f'virtual_ranks={batch}')}, or: {line.setting(f'batch={ranks}')}"
        problems.append(Problem(f"virtual_ranks = {ranks}", true, do))
    axes, wrong = _mesh(values, size, line)
    problems += wrong + _pipeline(values, axes, line) + problems_of_exchange(values, None if wrong else axes, line)
    problems += problems_of_buddy(values, axes, line) + problems_of_audits(values, axes, line) if not wrong else []
    if ranks is not None and not wrong and (size := computing_processes(values, axes)) > ranks >= 1:
        beside, who = axes.data - size, ("process", "processes") if size == axes.data else ("worker", "workers")
        true = f"{plural(ranks, 'virtual rank')}: 1 to {plural(ranks, *who)}."
        # More virtual ranks are another computation, so that comes second, and with the batch they need.
        more = [f"virtual_ranks={size}", *([f"batch={size}"] if batch is not None and size > batch else [])]
        other = line.in_processes(size + beside).setting(*more)
        do = f"{line.in_processes(ranks + beside)}, or (other bits): {other}"
        problems.append(Problem(plural(size, *who), true, do))
    return problems


def _misfit(entry: SettingEntry, line: CommandLine) -> Problem | None:
    try:
        typed(entry.hint, entry.default)
    except ValueMismatch as misfit:
        do = str(line.setting(f"{entry.name}={example_of(entry)}"))
        return Problem(f"{entry.name} = {shown(entry.default)}", f"It is not {misfit}.", do)
    return None


def _out_of_limits(values: dict[str, Any], line: CommandLine) -> list[Problem]:
    problems = []
    for name, (least, most) in LIMITS.items():
        value = values.get(name)
        if value is not None and not least <= value <= most:
            true = f"It must be at least {least}." if value < least else f"It can be at most {most}."
            do = str(line.setting(f"{name}={least if value < least else most}"))
            problems.append(Problem(f"{name} = {value}", true, do))
    clip = values.get("clip")
    if clip is not None and not clip > 0:
        true = "The largest norm must be a number above 0; none means no clipping."
        do = f"{line.setting('clip=1.0')}, or: {line.setting('clip=none')}"
        problems.append(Problem(f"clip = {clip}", true, do))
    return problems


def _mesh(values: dict[str, Any], size: int, line: CommandLine) -> tuple[MeshShape, list[Problem]]:
    """The mesh that the processes form, or why they cannot."""
    names = {f"parallel.{name}": name for name in MeshShape._fields}
    sizes = {axis: values.get(name, FILL if axis == "replicate" else 1) for name, axis in names.items()}
    problems = [
        Problem(f"{name} = {sizes[axis]}", "An axis has 1 or more processes; -1: what is left.", do)
        for name, axis in names.items()
        if sizes[axis] < 1 and sizes[axis] != FILL and (do := str(line.setting(f"{name}=1")))
    ]
    if problems:
        return MeshShape(), problems
    given = [name for name, axis in names.items() if sizes[axis] != FILL]
    filled = [name for name in names if name not in given]
    if len(filled) > 1:
        asked = " and ".join(f"{name} = -1" for name in filled)
        return MeshShape(), [
            Problem(asked, "One axis takes what the others leave.", str(line.setting(f"{filled[0]}=1")))
        ]
    axes = fill(sizes, size)
    if axes is not None:
        return axes, []
    told = " times ".join(f"{name}={values[name]}" for name in given if values[name] != 1) or f"{given[0]}=1"
    true = f"{told} makes {'multiples of ' * bool(filled)}{prod(values[name] for name in given)}."
    dos = [str(line.in_processes(n)) for n in fitting(sizes, size)]
    if not filled and "parallel.replicate" in given and size % prod(sizes[a] for a in sizes if a != "replicate") == 0:
        dos.append(str(line.setting("parallel.replicate=-1")))
    elif size == 1:
        dos.append(str(line.setting(*(f"{name}=1" for name in given if values[name] != 1))))
    return MeshShape(), [Problem(plural(size, "process", "processes"), true, ", or: ".join(dos))]


def _pipeline(values: dict[str, Any], axes: MeshShape, line: CommandLine) -> list[Problem]:
    """What does not go together with a pipeline."""
    if axes.pipeline == 1:
        return []
    asked, problems = f"parallel.pipeline = {axes.pipeline}", []
    if values.get("virtual_ranks") == 1:
        true = "One virtual rank draws its random numbers from one stream, which goes through one process."
        problems.append(Problem(f"{asked} and virtual_ranks = 1", true, str(line.setting("virtual_ranks=2"))))
    for other, true in BESIDE_NO_PIPELINE.items():
        if (size := getattr(axes, other)) > 1:
            do = str(line.setting(f"parallel.{other}=1"))
            problems.append(Problem(f"{asked} and parallel.{other} = {size}", true, do))
    schedule, loops, stages = (
        values.get(f"parallel.{name}") for name in ("schedule", "stages_per_rank", "split_points")
    )
    if schedule in TWICE_BACK and values.get("parallel.activation_checkpoint") == "selective":
        true = "It goes backward through a layer twice, and the first time uses up what selective recompute has kept."
        do = (
            f"{line.setting('parallel.activation_checkpoint=full')}, or: "
            f"{line.setting('parallel.schedule=Interleaved1F1B')}"
        )
        problems.append(
            Problem(f"parallel.schedule = {schedule} and parallel.activation_checkpoint = selective", true, do)
        )
    if schedule in IN_V and loops not in (2, None):
        do = f"{line.setting('parallel.stages_per_rank=2')}, or: {line.setting('parallel.schedule=Interleaved1F1B')}"
        problems.append(
            Problem(f"parallel.schedule = {schedule} and parallel.stages_per_rank = {loops}", "It has 2 each.", do)
        )
    elif stages and loops is not None and schedule is not None:
        count = axes.pipeline * (1 if schedule in STRAIGHT else loops)
        if len(stages) != count - 1:
            true = f"{plural(count, 'stage')} begin with the model and with {plural(count - 1, 'module')}."
            problems.append(
                Problem(f"parallel.split_points = {shown(stages)}", true, str(line.setting("parallel.split_points=[]")))
            )
    return problems


def _without_one_end(values: dict[str, Any], line: CommandLine) -> list[Problem]:
    """Either steps or epochs says when it ends."""
    if not {"steps", "epochs"} <= set(values):
        return []
    steps, epochs = values["steps"], values["epochs"]
    if steps is None and epochs is None:
        do = f"{line.setting('steps=100')}, or: {line.setting('epochs=1')}"
        return [Problem("steps = none and epochs = none", "One of them must say when this run ends.", do)]
    if steps is not None and epochs is not None:
        do = f"{line.setting('epochs=none')}, or: {line.setting('steps=none')}"
        return [Problem(f"steps = {steps} and epochs = {epochs}", "Only one of them can say when it ends.", do)]
    return []


STRAIGHT = ("GPipe", "1F1B")
"""Schedules in which a process has one stage. In the others it has several."""

IN_V = ("ZBVZeroBubble", "DualPipeV")
"""Schedules that go down the processes and up again: each has two stages, the first one has the model's ends."""

TWICE_BACK = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that make the gradients of inputs first, and those of weights when there is time."""

LIMITS: dict[str, tuple[float, float]] = {
    "steps": (1, float("inf")),
    "epochs": (1, float("inf")),
    "batch": (1, float("inf")),
    "micro_batch": (1, float("inf")),
    "virtual_ranks": (1, float("inf")),
    "seed": (0, 2**64 - 1),  # keys are made of 64 bits
    "threads": (1, float("inf")),
    "checkpoint.every": (0, float("inf")),
    "divergence.every": (0, float("inf")),
    "audit_every": (0, float("inf")),
    "checkpoint.keep": (1, float("inf")),
    "checkpoint.keep_every": (0, float("inf")),
    "parallel.stages_per_rank": (1, float("inf")),
    "loader.workers": (0, float("inf")),
    "loader.prefetch": (1, float("inf")),
    "parallel.model_parallel_devices": (1, float("inf")),
    "parallel.data_parallel_devices": (1, float("inf")),
    "ddp.bucket_mb": (0.001, float("inf")),
    "compress.start_step": (0, float("inf")),
    "compress.groups": (2, float("inf")),
    "compress.rank": (1, float("inf")),
    "server.count": (1, float("inf")),
    "server.staleness": (0, float("inf")),
    "local_sgd.sites": (2, float("inf")),
    "local_sgd.sync_every": (1, float("inf")),
    "local_sgd.warmup_steps": (0, float("inf")),
    "local_sgd.num_fragments": (1, float("inf")),
    "local_sgd.sync_delay": (0, float("inf")),
    "watchdog.timeout": (0, float("inf")),
}
