"""The request for a run, in a process of the run: settings, run directory, and the checkpoint to resume."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, chdir, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from unisono.checkpoint import manifest
from unisono.checkpoint.load import Accept, Checkpoint, metadata_of, newest, only_signed
from unisono.checkpoint.signature import key_problems, trusted_keys
from unisono.checkpoint.storage import prepare_storage
from unisono.cli.request.run_dir import (
    ARGUMENTS,
    choose_run_dir,
    free_name,
    is_ours,
    lock_run_dir,
    newest_run,
    not_writable,
    problems_of_run_dir,
    run_in,
    script_in,
    write,
)
from unisono.cli.request.run_options import RunRequest
from unisono.cli.request.target import problems_of_train, recipes
from unisono.cli.start.autoresume import job_mark
from unisono.cli.start.device_checks import problems_here
from unisono.config import (
    CommandLine,
    LoadedSettings,
    SecureSettings,
    Settings,
    flatten,
    gather,
    merge_corrections,
    provenance_lines,
)
from unisono.config.validate import examine
from unisono.distributed.backends.backend_choice import backend_problems
from unisono.environment import World
from unisono.errors import Problem, SettingsError
from unisono.monitor import console
from unisono.security.file_modes import Share, make_closed, share_with
from unisono.security.masking import mask_words, masked, remember
from unisono.train.guarantees.run_identity import RUN, compare, foreign_checkpoint, new_run
from unisono.train.run import Run

S = TypeVar("S", bound=Settings)

KNOWN_LATER = ("length", "kernels", "ties", "own exchange")
"""Fields of a run's identity that depend on its data, model and script. The run compares them itself."""

NEVER_ACCEPTED = ("layout", "ties", ARGUMENTS)
"""Fields whose changes need no --accept-change; result.json lists them."""

COMPARED_LATER = (*KNOWN_LATER, "layout", ARGUMENTS, RUN)
"""Fields that are compared elsewhere."""


@dataclass(frozen=True)
class StartRequest:
    """The request for a run in this process, and the decisions that the main process makes for all.

    Args:
        script: the script.
        request: its flags.
        world: this process among those of the run.
    """

    script: Path
    request: RunRequest
    world: World

    def line(self) -> CommandLine:
        """Return the command that started the run, for any launcher."""
        if self.world.launcher in ("srun", "mpirun"):
            return self.request.line(self.world.launcher, "-n", str(self.world.size), "python", str(self.script))
        if self.world.launcher != "unisono":
            line = self.request.line("python", str(self.script))
            all_here = 1 < self.world.size == self.world.local_size
            return line.in_processes(self.world.size) if all_here else line
        ranks = ["--ranks", str(self.world.size)] if self.world.size > 1 else []
        ranks += ["--cpu-ranks", str(self.world.cpu_ranks)] if self.world.cpu_ranks else []
        each = self.world.devices.ranks_per_device
        ranks += ["--ranks-per-device", str(each)] if each != 1 else []
        return self.request.line("unisono", "run", self._target(), *ranks)

    def _target(self) -> str:
        """Return the name of the recipe, or the path of the script."""
        return next((name for name, path in recipes().items() if path == self.script), str(self.script))

    def plan_line(self, memory: float) -> CommandLine:
        """Return the command that finds placements of this run within some bytes of memory of a process."""
        return self.request.plan_line(self._target(), self.world.size, memory)

    def settings(self, cls: type[S], train: Callable[[Run[S]], None]) -> LoadedSettings[S]:
        """Return the settings. Raises SettingsError with everything that is wrong with the request or with `train`."""
        request, stem = self.request, self.script.stem
        line = CommandLine(tuple(shlex.split(request.typed))) if request.typed else self.line()
        gathered = gather(
            cls,
            file=request.settings_file,
            sets=request.sets,
            earlier=request.earlier(request.run_dir or newest_run(stem)),
            line=line,
        )
        loaded, problems = examine(gathered, self.world.size)
        if loaded is not None and not problems:
            problems += problems_here(loaded.settings, self.world.size, line)
            problems += backend_problems(loaded.settings.backend, line)
            problems += self.key_problems(loaded.settings.secure)
        if self.world.launcher == "python":  # with other launchers the main process checks it
            problems += problems_of_run_dir(stem, request.run_dir, resume=request.resume, line=line)
        problems += request.problems_of_accepted((), line) + request.problems_of_faults(line)
        problems += problems_of_train(self.script, train)
        if problems or loaded is None:
            raise SettingsError.of(merge_corrections(problems, line))
        remember(flatten(loaded.settings))
        return loaded

    def run_dir(self, kept: ExitStack) -> tuple[str, str]:
        """Return the run directory as it was typed, and its absolute path. It stays locked until `kept` is closed."""
        path, request = self.request.run_dir, self.request
        if self.world.launcher != "unisono":  # our launcher chose and locked it
            with chdir(self.world.folder):
                path = choose_run_dir(self.script.stem, path, resume=request.resume, line=self.line())
                kept.enter_context(lock_run_dir(path, self.line()))
        assert path is not None
        return str(path), str(Path(self.world.folder, path))

    def share(self, run_dir: Path, share: Share, kept: ExitStack) -> None:
        """Set which users may read the run directory on this host, and a folder of checkpoints outside of it.

        When `kept` is closed this is repeated for the files that the script and libraries have created. Prints a line
        for each folder that other users can enter although they should not.
        """
        if self.world.local_rank == 0:
            for text in self._share(run_dir, share):
                console.print_line(text)
            kept.callback(self._share, run_dir, share)

    def _share(self, run_dir: Path, share: Share) -> list[str]:
        lines: list[str] = []
        where = manifest.storage_history(run_dir)[0]
        folders = [run_dir] if where is None or "://" in where else [run_dir, Path(where)]
        for folder in folders:
            with suppress(OSError):  # no such folder on this host
                if why := share_with(share, folder, is_ours):
                    do = shlex.join(["chmod", "700", str(folder)])
                    lines.append(f"Other users can enter {folder}: {why}. To close it: {do}")
        return lines

    def write_files(self, run_dir: Path, loaded: LoadedSettings[Any], run: str, facts: dict[str, Any]) -> None:
        """Write settings.toml and environment.json. Raises SettingsError if that fails, as on a full disk."""
        started: dict[str, Any] = {"started": time.strftime("%Y-%m-%d %H:%M:%S%z"), "command": str(self.line())}
        started |= {"script": str(Path(self.world.folder, self.script).resolve())}
        started |= {"arguments": mask_words(self.request.own)}
        started |= {"folder": self.world.folder, **job_mark(self.request), RUN: run}
        try:
            write(run_dir / "settings.toml", provenance_lines(loaded.settings, loaded.sources))
            about = {**started, **{name: masked(name, value) for name, value in facts.items()}}
            write(run_dir / "environment.json", json.dumps(about, indent=1) + "\n")
        except OSError as error:
            shown = self.request.run_dir or run_dir
            raise SettingsError.of([not_writable(shown, error.strerror or str(error), self.line())]) from None

    def save_in(self, where: str | None, run_dir: Path, kept: ExitStack) -> str | None:
        """Lock the place of checkpoints, and return it; None for the run directory. Raises SettingsError."""
        if where is not None and "://" not in where:
            where = str(Path(self.world.folder, where))
        prepare_storage(run_dir, where, resume=self.request.resume)
        self.lead(run_dir, kept)
        return manifest.storage_history(run_dir)[0]

    def lead(self, run_dir: Path, kept: ExitStack, *, patience: float = 0.0) -> None:
        """Lock the folder of checkpoints until `kept` is closed, if it is outside of the run directory.

        Raises:
            SettingsError: if another run holds the lock for longer than `patience` seconds.
        """
        where = manifest.storage_history(run_dir)[0]
        if where is None or "://" in where:
            return
        make_closed(Path(where))
        try:
            kept.enter_context(lock_run_dir(Path(where), self.line(), patience=patience))
        except SettingsError as error:
            another = self.line().setting("checkpoint.dir=" + shlex.quote(f"{where}-2"))
            raise SettingsError(f"{where} is in use.", error.problems[0].facts, str(another)) from None

    def begin(self, run_dir: Path, identity: dict[str, Any], accept: Accept) -> tuple[str | None, str]:
        """Return the checkpoint to resume, None for a start at step 0, and the id of the run.

        Args:
            run_dir: the run directory.
            identity: the facts on which the bits of the run depend.
            accept: raises CheckpointError for a checkpoint whose signature is missing or wrong.

        Raises:
            SettingsError: the checkpoint does not match, or belongs to another run.
            CheckpointError: it cannot be read, or is not signed.
        """
        if not self.request.resume:
            return None, new_run()
        path, own = newest(run_dir, console.print_line, accept), run_in(run_dir)
        before = metadata_of(path)["identity"] if path is not None else {}
        fields = {*before, *identity, "length", "kernels", RUN} - {*NEVER_ACCEPTED}
        problems = self.request.problems_of_accepted(fields, self.line())
        known = {name: value for name, value in before.items() if name not in COMPARED_LATER}
        if path is not None:
            now = {name: value for name, value in identity.items() if name not in COMPARED_LATER}
            changed = compare(known, now, list(self.request.accept_change), str(self.line()))
            problems += self._other_script(run_dir, known, now) or changed if changed else []
        if path is not None and RUN not in self.request.accept_change:
            problems += foreign_checkpoint(path, before.get(RUN), own, self.line())
        if problems:
            raise SettingsError.of(problems)
        if path is None:
            console.print_line(f"There is no checkpoint in {self.request.run_dir} yet. Starting at step 0.")
            return None, own or new_run()
        saved = before.get(RUN)
        return str(path), saved if isinstance(saved, str) else own or new_run()

    def _other_script(self, run_dir: Path, before: dict[str, Any], now: dict[str, Any]) -> list[Problem]:
        """Return a problem if the run is one of another script, which still exists: its settings explain nothing then.

        Args:
            run_dir: the run directory.
            before: the identity of the run.
            now: the identity of this run, which differs.
        """
        script, shown, line = script_in(run_dir), self.request.run_dir, self.line()
        if script is None or script.name == self.script.name or not script.is_file():
            return []
        folder = Path(self.world.folder)
        target = str(script.relative_to(folder) if script.is_relative_to(folder) else script)
        differ = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        resume = CommandLine(tuple(target if word == self._target() else word for word in line.words))
        for assignment in self.request.sets:
            if assignment.partition("=")[0].strip() in differ:
                resume = resume.without("--set", assignment)
        begin = line.without("--resume").without("--accept-change").flag("--run-dir", str(free_name(Path(str(shown)))))
        error = f"{shown} is a run of {script.name}, and not of {self.script.name}."
        return [Problem(error, f"Their settings differ: {', '.join(differ)}.", f"{resume}, or: {begin}")]

    def accept(self, trust: Sequence[str]) -> Accept:
        """Return the function that refuses checkpoints which none of these keys has signed."""
        return only_signed(trusted_keys([Path(self.world.folder, path) for path in trust]))

    def key_problems(self, secure: SecureSettings) -> list[Problem]:
        """Return what is wrong with the keys that the settings name."""
        sign = None if secure.sign is None else Path(self.world.folder, secure.sign)
        return key_problems(sign, [Path(self.world.folder, path) for path in secure.trust])


def accepted_changes(resumed: Checkpoint | None, identity: dict[str, Any], request: RunRequest) -> list[dict[str, Any]]:
    """Return the changes that this resume accepts, for result.json.

    A change of the layout need not be accepted, because results agree to rounding. Nor need one of the script's
    arguments, because many of them (a path, a name) change no result. Both are listed.
    """
    if resumed is None:
        return []
    before = resumed.about["identity"]
    return [
        {"step": resumed.steps, "field": name, "from": _shown(before.get(name)), "to": _shown(identity.get(name))}
        for name in (*request.accept_change, "layout", ARGUMENTS)
        if name not in (*KNOWN_LATER, RUN) and before.get(name) != identity.get(name)
    ]


def _shown(value: Any) -> Any:
    """Return a value of an identity for result.json: a list of arguments as it is typed."""
    return shlex.join(value) or "none" if isinstance(value, list) else value
