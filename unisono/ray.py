"""`unisono.ray.run(main, Settings(...), ranks=8)`: train in actors of Ray, from a driver or within a trial of Ray Tune.

trial of Tune ── actor ── unisono.ray.run ──▶ an actor for each process, in the placement group of the trial
     ◀── tune.report(loss=...) ── a thread that follows RUN/timeline
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from unisono.cli.clusters.ray_command import actors
from unisono.cli.commands.run_command import numbers
from unisono.cli.request.restarts import Hosts
from unisono.clusters.ray.ray_room import RayRequest, require_ray
from unisono.config import Settings
from unisono.environment import DeviceAssignment
from unisono.json_forms import parse
from unisono.notebook import LaunchCall, launched_function, launched_script
from unisono.trackers.growing_file import GrowingFile

POLL_SECONDS = 0.5
"""Seconds between two looks at the timeline."""

NOT_METRICS = ("step", "t", "us", "wait", "cpu")
"""Values of a step in the timeline that the script has not logged."""


def run(
    main: Callable[[Any], None] | str | os.PathLike[str],
    settings: Settings | type[Settings] | Mapping[str, Any] | None = None,
    *,
    ranks: int | str = 1,
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    address: str = "auto",
    cpus_per_rank: float = 1.0,
    gpus_per_rank: float = 0.0,
    strategy: str = "PACK",
    wait: float = 60.0,
) -> dict[str, Any]:
    """Train in `ranks` actors of Ray, and return the content of result.json.

    Where this process is connected to a cluster, as in a task or a trial, that cluster is used. In a trial of Ray Tune,
    the actors use the placement group of the trial (see `resources`), the run directory is in the trial's folder by
    default, and what each step logs is passed to `ray.tune.report`.

    Args:
        main: the function that a script passes to unisono.main; or the name of a recipe, or the path of a script.
        settings: an instance of a settings class, or the class for its defaults; for a recipe or a script, values by
            their names: {"batch": 64}.
        ranks: the number of processes, or "MIN:MAX".
        run_dir: the run directory, on a file system that all nodes share.
        resume: continue from the newest complete checkpoint.
        address: the cluster, as for `unisono ray`.
        cpus_per_rank: logical CPUs of each actor.
        gpus_per_rank: GPUs of each actor.
        strategy: placement of actors, as for `unisono ray`.
        wait: seconds to wait for room.

    Raises:
        SettingsError: for a wrong request, before any process starts; for a cluster without room or answer.
        RankFailedError: if the run fails, with the traceback of the rank that failed first.
        KeyboardInterrupt: after Ctrl-C. The run saves its state first.
    """
    require_ray()
    trial = _trial_folder()
    if run_dir is None and trial is not None:
        run_dir = trial / "run"
    name = getattr(main, "__name__", repr(str(main)))
    line = LaunchCall(name=name, ranks=ranks, run_dir=run_dir, resume=resume, call="unisono.ray.run")
    asked = RayRequest(numbers(str(ranks), 0, line).usual, cpus_per_rank, gpus_per_rank, strategy, wait)
    follows = Path(run_dir) if trial is not None and run_dir is not None else None
    places, devices = partial(_places, address, asked, follows), DeviceAssignment(sees_only_own=True)
    if callable(main):
        chosen: Any = Settings if settings is None else settings
        return launched_function(main, chosen, line, devices=devices, places=places)
    values = settings if isinstance(settings, Mapping) else {}
    return launched_script(os.fspath(main), values, line, devices=devices, places=places)


def resources(*, ranks: int, cpus_per_rank: float = 1.0, gpus_per_rank: float = 0.0, strategy: str = "PACK") -> Any:
    """Return what a trial needs, for `ray.tune.with_resources`: a bundle for the trial, and one for each actor.

    Args:
        ranks: the number of processes.
        cpus_per_rank: logical CPUs of each actor.
        gpus_per_rank: GPUs of each actor.
        strategy: placement of the bundles.
    """
    require_ray()
    from ray.tune import PlacementGroupFactory

    bundle = RayRequest(ranks, cpus_per_rank, gpus_per_rank).bundle()
    return PlacementGroupFactory([{"CPU": 1.0}, *([bundle] * ranks)], strategy=strategy)


@contextmanager
def _places(address: str, asked: RayRequest, follows: Path | None) -> Iterator[Hosts]:
    """Reserve room while the block runs, and report to Tune what the run in a folder logs."""
    with actors(address, asked) as hosts:
        if follows is None:
            yield hosts
            return
        reports = TuneReports(follows)
        reports.begin()
        try:
            yield hosts
        finally:
            reports.end()


def _trial_folder() -> Path | None:
    """Return the folder of this trial of Ray Tune; None if there is none."""
    try:
        from ray import tune

        folder = tune.get_context().get_trial_dir()
    except (ImportError, RuntimeError, AttributeError):  # without ray[tune], or outside of a trial
        return None
    return Path(folder) if folder else None


class TuneReports:
    """Pass what each step has logged to Ray Tune, in a thread.

    Args:
        run_dir: the run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "timeline"
        self._files: dict[Path, GrowingFile] = {}
        self._old = set(self._folder.glob("rank-*.jsonl"))
        for path in self._old:  # the steps of a resumed run are reported already
            self._file(path).lines()
        self._step = -1
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="tune reports", daemon=True)

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """Report the last steps."""
        self._over.set()
        self._thread.join()

    def _file(self, path: Path) -> GrowingFile:
        return self._files.setdefault(path, GrowingFile(path))

    def _follow(self) -> None:
        from ray import tune

        while True:
            over = self._over.wait(POLL_SECONDS)
            steps = dict(sorted(self._new_steps().items()))
            for step, metrics in steps.items():
                self._step = step
                tune.report({**metrics, "step": step + 1})
            if over:
                return

    def _new_steps(self) -> dict[int, dict[str, float]]:
        """Return the metrics of steps that were not reported: all processes log the same."""
        found: dict[int, dict[str, float]] = {}
        for path in self._folder.glob("rank-*.jsonl"):
            while lines := self._file(path).lines():
                for values in map(parse, lines):
                    step = values.get("step") if values is not None and "event" not in values else None
                    if values is not None and isinstance(step, int) and step > self._step:
                        kept = {name: value for name, value in values.items() if name not in NOT_METRICS}
                        numbers = {n: v for n, v in kept.items() if isinstance(v, int | float)}
                        found[step] = {**found.get(step, {}), **numbers}
        return found
