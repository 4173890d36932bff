"""Run the script of an earlier run again, for `unisono replay`, `audit`, `export`, `predict` and others.

A run directory holds everything that this needs: the script's path and arguments (environment.json), the settings
(settings.toml), and checkpoints. The new run gets a run directory in a temporary folder, with a link to the checkpoint
that it starts from; the earlier run's directory is only read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import chdir
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.checkpoint import manifest
from unisono.cli.compare.layout_spec import ALONE
from unisono.cli.request.run_dir import CHECKPOINTS_IN_RUN_DIR, arguments_not_stored
from unisono.cli.request.run_options import RunRequest
from unisono.cli.request.target import recipes
from unisono.config import ENVIRONMENT, CommandLine
from unisono.config import read as read_settings
from unisono.config.exchange_registry import EXCHANGES
from unisono.errors import SettingsError
from unisono.launcher import local_launch
from unisono.launcher.supervisor import RunOutcome
from unisono.security.masking import is_masked

PLAIN = (
    *ALONE.sets,
    *(
        "parallel.sequence_parallel=false",
        "parallel.loss_parallel=false",
        "parallel.replicate_shards=false",
        "parallel.offload=false",
    ),
    *("parallel.schedule=1F1B", "parallel.split_points=[]", "parallel.replicate=-1"),
    *(
        "loader.workers=0",
        "checkpoint.every=0",
        "balance.work_stealing=false",
        "balance.by_speed=false",
        "audit_every=0",
    ),
)
"""Settings that results do not depend on, with the values for whole models and no other activity."""

AS_TREE = ("exchange=tree", "server.count=1")
"""Synchronous parameter servers compute the bits of the tree."""


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """A script, and how to run it again.

    Args:
        script: the script.
        own: the script's own arguments.
        folder: the working directory.
        run_dir: the earlier run; None to start from the beginning.
        settings: the settings of the earlier run by dotted name.
        sets: settings that override them.
        settings_file: the settings file.
        start: starts a script; see launcher/local_launch.py.
    """

    script: Path
    own: tuple[str, ...] = ()
    folder: Path = Path()
    run_dir: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    sets: tuple[str, ...] = ()
    settings_file: Path | None = None
    start: Callable[..., RunOutcome] = local_launch.run

    def checkpoint(self, steps: float = float("inf")) -> tuple[int, Path | None]:
        """Return the newest undamaged checkpoint of at most this step, as (step, path); (0, None) if there is none."""
        for after, path in manifest.checkpoints(self.run_dir) if self.run_dir is not None else []:
            if after <= steps and manifest.damage_of(path) is None:
                return after, path
        return 0, None

    def request(
        self, scratch: Path, checkpoint: Path | None, sets: Collection[str], trace: str, accept: Collection[str] = ()
    ) -> RunRequest:
        """Return the flags of the new run, and create its run directory, `scratch`."""
        accepted: tuple[str, ...] = ()
        scratch.mkdir(parents=True)
        if checkpoint is not None:
            (scratch / "checkpoints").mkdir()
            (scratch / "checkpoints" / checkpoint.name).symlink_to(checkpoint.resolve())
            accepted = (*ENVIRONMENT, *accept, *(("exchange",) if AS_TREE[0] in self.sets else ()))
        return RunRequest(
            sets=(*self.sets, *sets, CHECKPOINTS_IN_RUN_DIR),
            settings_file=self.settings_file,
            resume=checkpoint is not None,
            accept_change=accepted,
            trace=trace,
            own=self.own,
        )

    def run(
        self,
        scratch: Path,
        *,
        ranks: int,
        checkpoint: Path | None,
        sets: Collection[str] = (),
        trace: str,
        accept: Collection[str] = (),
    ) -> RunOutcome:
        """Run the script again without output on the screen. `accept`: settings that may differ from the run's."""
        request = self.request(scratch, checkpoint, sets, trace, accept)
        with chdir(self.folder):
            return self.start(
                self.script,
                request.arguments(scratch),
                ranks=ranks,
                logs=scratch / "log",
                threads=int(self.settings.get("threads", 1)),
                screen=None,
                verbose=False,
            )

    def environment(self, run_dir: Path | None = None) -> dict[str, Any]:
        """Return the environment.json of a run, by default the earlier one; {} if it cannot be read."""
        try:
            found = json.loads(
                (run_dir or self.run_dir or Path("?")).joinpath(ENVIRONMENT_FILE).read_text(encoding="utf-8")
            )
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


ENVIRONMENT_FILE = "environment.json"


def is_run(path: Path) -> bool:
    """Return whether a path is a run directory."""
    return (path / "settings.toml").is_file()


def earlier(run_dir: Path, script: Path | None, line: CommandLine) -> Rerun:
    """Return how to run the script of this run again.

    Args:
        run_dir: the run directory.
        script: the script, if it was moved.
        line: the typed command, for messages.

    Raises:
        SettingsError: if it is not a run directory, or the run cannot be repeated on one process.
    """
    if not is_run(run_dir):
        facts = "It has no settings.toml." if run_dir.is_dir() else "There is no such folder."
        do = f"{' '.join(line.words[:2])} runs/NAME-TIME, with a run's directory"
        raise SettingsError(f"{run_dir} is not a run directory.", facts, do)
    settings, _ = read_settings(run_dir / "settings.toml")
    again = Rerun(
        script=Path(), run_dir=run_dir.absolute(), settings=settings, settings_file=run_dir.absolute() / "settings.toml"
    )
    known = again.environment()
    folder = Path(known.get("folder") or ".")
    folder = folder if folder.is_dir() else Path.cwd()
    found = _script(script, known, folder)
    if found is None:
        missing = script if script is not None else known.get("script", "a script that it does not name")
        error = f"Cannot find the script of {run_dir}."
        facts = f"There is no file {missing}." if script is not None else f"It ran {missing}, which does not exist."
        raise SettingsError(error, facts, str(line.flag("--script", "SCRIPT.py")))
    refuse_unrepeatable(settings, run_dir)
    more = AS_TREE if settings.get("exchange") == "server" else ()
    if settings.get("parallel.data_parallel_devices", 1) == 1:  # data parallel devices use these, too
        more = (*more, "parallel.model_parallel_devices=1", "parallel.devices=[]")
    own = tuple(known.get("arguments", ()))
    if is_masked(own):
        do = "give secrets to the script as environment variables, which this command passes on"
        raise arguments_not_stored(run_dir, do)
    return replace(again, script=found, own=own, folder=folder, sets=(*PLAIN, *more))


def refuse_unrepeatable(settings: Mapping[str, Any], run_dir: Path) -> None:
    """Raise SettingsError for a run whose steps one process cannot repeat."""
    exchange = str(settings.get("exchange"))
    why = EXCHANGES[exchange].not_replayed if exchange in EXCHANGES else ""  # the run refuses an unknown one by name
    if why and not (exchange == "server" and settings.get("server.staleness") == 0):
        do = f"look at its losses in {run_dir / 'timeline'}"
        raise SettingsError(f"A run with exchange = {exchange} cannot be repeated.", why, do)


def _script(named: Path | None, known: Mapping[str, Any], folder: Path) -> Path | None:
    """Return the script of a run: the one named now, the original path, or the recipe with its name."""
    if named is not None:
        return named.absolute() if named.is_file() else None
    path = Path(folder, known.get("script", "?"))
    if path.is_file():
        return path
    return recipes().get(path.stem)
