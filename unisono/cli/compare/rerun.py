"""A run that was, and how its script is run again: what `unisono replay` and `unisono audit` have in common.

A run directory holds what it takes: the script's path and arguments (environment.json), the settings that it had
(settings.toml), and checkpoints. What is run again has a run directory of its own, in a temporary folder, with links to
the checkpoint that it begins with; the one of the run is only read.
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
from unisono.cli.request.run_dir import APART
from unisono.cli.request.run_options import RunRequest
from unisono.cli.request.target import recipes
from unisono.config import ENVIRONMENT, CommandLine
from unisono.config import read as read_settings
from unisono.config.exchanges import EXCHANGES
from unisono.errors import SettingsError
from unisono.launcher import local_launch
from unisono.launcher.supervisor import RunOutcome

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
"""Settings that change no bit, as they are where each process has the whole model, and nothing happens beside it."""

AS_TREE = ("exchange=tree", "server.count=1")
"""Of parameter servers in step, which have the bits of the tree."""


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """A script with its settings, to be run again.

    run_dir   of the run that was; None: there was none, and the script begins anew
    folder    where its relative paths begin
    settings  of the run that was, by their dotted names
    sets      what is set otherwise, so that it can be run again
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
        """The newest whole checkpoint after at most so many steps, and after how many it is; (0, None): the run's
        beginning."""
        for after, path in manifest.checkpoints(self.run_dir) if self.run_dir is not None else []:
            if after <= steps and manifest.damage_of(path) is None:
                return after, path
        return 0, None

    def request(self, scratch: Path, checkpoint: Path | None, sets: Collection[str], trace: str) -> RunRequest:
        """What its processes are asked for; their run directory is made in `scratch`."""
        accepted: tuple[str, ...] = ()
        scratch.mkdir(parents=True)
        if checkpoint is not None:
            (scratch / "checkpoints").mkdir()
            (scratch / "checkpoints" / checkpoint.name).symlink_to(checkpoint.resolve())
            accepted = (*ENVIRONMENT, *(("exchange",) if AS_TREE[0] in self.sets else ()))
        return RunRequest(
            sets=(*self.sets, *sets, APART),
            settings_file=self.settings_file,
            resume=checkpoint is not None,
            accept_change=accepted,
            trace=trace,
            own=self.own,
        )

    def run(
        self, scratch: Path, *, ranks: int, checkpoint: Path | None, sets: Collection[str] = (), trace: str
    ) -> RunOutcome:
        """Run it again, in silence."""
        request = self.request(scratch, checkpoint, sets, trace)
        with chdir(self.folder):
            return self.start(
                self.script,
                request.arguments(scratch),
                ranks=ranks,
                logs=scratch / "log",
                threads=int(self.settings.get("threads", 1)),
                screen=None,
                say=False,
            )

    def environment(self, run_dir: Path | None = None) -> dict[str, Any]:
        """What a run knew of its machine; {} where that is not there."""
        try:
            found = json.loads((run_dir or self.run_dir or Path("?")).joinpath(ABOUT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


ABOUT = "environment.json"


def is_run(path: Path) -> bool:
    """Is it the directory of a run?"""
    return (path / "settings.toml").is_file()


def earlier(run_dir: Path, script: Path | None, line: CommandLine) -> Rerun:
    """How this run's script is run again; `script`: where it is by now, if somebody says so. Raises SettingsError."""
    asked = str(line)
    if not is_run(run_dir):
        there = "in it, as every run leaves one" if run_dir.is_dir() else "and no such folder"
        true = f"There is no settings.toml {there}."
        raise SettingsError(asked, true, f"{' '.join(line.words[:2])} runs/NAME-TIME, with a run's directory")
    settings, _ = read_settings(run_dir / "settings.toml")
    again = Rerun(
        script=Path(), run_dir=run_dir.absolute(), settings=settings, settings_file=run_dir.absolute() / "settings.toml"
    )
    known = again.environment()
    folder = Path(known.get("folder") or ".")
    folder = folder if folder.is_dir() else Path.cwd()
    found = _script(script, known, folder)
    if found is None:
        it = f"It ran {known.get('script', 'a script that it does not name')}, which is not there."
        true = it if script is None else f"There is no file {script}."
        raise SettingsError(asked, true, str(line.flag("--script", "SCRIPT.py")))
    refuse_parted(settings, asked, run_dir)
    more = AS_TREE if settings.get("exchange") == "server" else ()
    if settings.get("parallel.data_parallel_devices", 1) == 1:  # these are for it as well, and change bits
        more = (*more, "parallel.model_parallel_devices=1", "parallel.devices=[]")
    return replace(again, script=found, own=tuple(known.get("arguments", ())), folder=folder, sets=(*PLAIN, *more))


def refuse_parted(settings: Mapping[str, Any], asked: str, run_dir: Path) -> None:
    """Raise SettingsError for a run whose steps one process cannot make again."""
    exchange = str(settings.get("exchange"))
    why = EXCHANGES[exchange].not_replayed
    if why and not (exchange == "server" and settings.get("server.staleness") == 0):
        do = f"look at its losses in {run_dir / 'timeline'}"
        raise SettingsError(f"{asked}: a run with exchange={exchange} cannot be repeated.", why, do)


def _script(named: Path | None, known: Mapping[str, Any], folder: Path) -> Path | None:
    """The script that a run ran: as named now, where it was, or the recipe of its name."""
    if named is not None:
        return named.absolute() if named.is_file() else None
    path = Path(folder, known.get("script", "?"))
    if path.is_file():
        return path
    return recipes().get(path.stem)
