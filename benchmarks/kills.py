"""Kill processes of runs at random times, and check that each run has the fingerprint of an undisturbed run.

    python -m benchmarks.kills                                              short: 8 kills of each kind
    python -m benchmarks.kills --random 100 --early 40 --checked 40 --workers 20 --torchrun 20

    --random    kill any rank, or two at once, after the first step, and also the processes that replace them
    --early     kill before the first step: while Python starts, in the script's own code, while processes connect
    --checked   kill in the first nine steps, of which five are verified; half of the runs have replicas of shards
    --workers   kill loader workers
    --torchrun  kill ranks one to three times in runs under `torchrun --max-restarts 3`, also during a restart

All kills are SIGKILL, and a run gets several. The layout is random for each run: replicas, shards, another exchange.
The command prints a table, and the output of each run with another fingerprint. The exit status is 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]

from benchmarks.machine import line
from unisono.environment import inherited

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import time
from dataclasses import dataclass, field
import torch
import unisono

@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    steps: int | None = 40
    batch: int = 16
    checkpoint: unisono.CheckpointSettings = unisono.CheckpointSettings(every=5)
    pause: float = field(default=0.002, metadata={"changes_bits": False})  # seconds for each micro-batch

class Momentum:
    # torch.optim imports torch._dynamo, which takes as long as importing torch

    def __init__(self, params):
        self.params = list(params)
        self.param_groups = [{"params": self.params}]
        self.speed = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self):
        for p, speed in zip(self.params, self.speed):
            p.sub_(speed.mul_(0.9).add_(p.grad, alpha=0.01))

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def state_dict(self):
        return {"speed": self.speed}

    def load_state_dict(self, state):
        for mine, saved in zip(self.speed, state["speed"]):
            mine.copy_(saved)

def main(run):
    whole = run.settings.parallel.shard == run.settings.parallel.pipeline == 1
    optimizer_class = Momentum if whole else torch.optim.AdamW
    x = torch.randn(101, 8, generator=torch.Generator().manual_seed(1))
    layers = lambda: [torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)]
    model = run.place(lambda: torch.nn.Sequential(*layers()))
    optimizer = optimizer_class(model.parameters())
    run.track(model=model, optimizer=optimizer)

    def loss(output, inputs, targets):
        time.sleep(run.settings.pause)
        return ((output - targets) ** 2).sum(), len(inputs)

    (run.dir / "loop").touch()
    for step in run.steps(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))):
        step.run(model, loss)
        step.update(optimizer)
        if step.number == 0:
            (run.dir / "first-step").touch()
        if step.number == 8:
            (run.dir / "ninth-step").touch()

if __name__ == "__main__":
    unisono.main(main, Settings)
"""
MORE_SETTINGS: list[str] = []
"""Settings of all runs, from the flag --set."""

LIMIT_SECONDS = 240.0
"""A run that takes longer counts as failed."""
LOOK_SECONDS = 0.005


class Case(NamedTuple):
    """Settings of a run."""

    name: str
    ranks: int
    sets: tuple[str, ...] = ()


SHARDS = Case("replicas of shards", 4, ("parallel.shard=2",))
CASES = (
    Case("replicas", 3),
    Case("two replicas", 2),
    Case("wide sums", 2, ("exchange=wide",)),
    Case("shards", 2, ("parallel.shard=2",)),
    SHARDS,
    Case("replicas of shards, by layer", 4, ("parallel.shard=2", "parallel.reshard=layer")),
    Case("shards with buddies", 2, ("parallel.shard=2", "parallel.replicate_shards=true")),
    Case("pipeline", 2, ("parallel.pipeline=2",)),
)
WORKERS = Case("loader workers", 2, ("loader.workers=1",))
TORCHRUN = (Case("torchrun, two", 2), Case("torchrun, three", 3), Case("torchrun, shards", 2, ("parallel.shard=2",)))


class Reference(NamedTuple):
    """Fingerprint and durations of an undisturbed run, in seconds."""

    fingerprint: str
    start: float  # from the first process to the end of the first step
    checked: float  # from the start of the loop to the end of the ninth step
    loop: float  # from the end of the first step to the end of the run


class Trial(NamedTuple):
    """Result of a run with kills."""

    kind: str
    case: Case
    kills: int
    seconds: float
    problem: str  # "": the fingerprint is right


class Running:
    """A command that trains, and its processes."""

    def __init__(self, folder: Path, case: Case, *, torchrun: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.py").write_text(SCRIPT)
        self.folder, self.torchrun, self.kills = folder, torchrun, 0
        self.of_child = "train.py" if torchrun else "unisono.launcher.worker_main"
        sets = [word for each in (*case.sets, *MORE_SETTINGS) for word in ("--set", each)]
        if torchrun:
            words = ["torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}", "--max-restarts=3"]
            words += ["train.py"]
        else:
            words = ["unisono.cli.main", "run", "train.py", "--ranks", str(case.ranks)]
        self.output = open(folder / "output", "wb")  # noqa: SIM115  (closed in end)
        self.start = time.monotonic()
        self.popen = subprocess.Popen(
            [sys.executable, "-m", *words, "--run-dir", "out", *sets],
            cwd=folder,
            env=inherited({"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}),
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )

    @property
    def over(self) -> bool:
        return self.popen.poll() is not None

    def has(self, mark: str) -> bool:
        """Return whether the script has touched this file: "loop", "first-step" or "ninth-step"."""
        return (self.folder / "out" / mark).exists()

    @property
    def has_stepped(self) -> bool:
        return self.has("first-step")

    def ranks(self) -> list[psutil.Process]:
        """Return the processes that train, in the order of their start."""
        with suppress(psutil.Error):
            children = psutil.Process(self.popen.pid).children()
            return [child for child in sorted(children, key=lambda child: child.pid) if self._trains(child)]
        return []

    def pids(self) -> set[int]:
        """Return the numbers of these processes."""
        return {rank.pid for rank in self.ranks()}

    def wait_for_new(self, before: set[int]) -> bool:
        """Wait for a training process that is not in `before`; return False if the command ended."""
        return self.wait_for(lambda: self.pids() - before)

    def _trains(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return any(word.endswith(self.of_child) for word in process.cmdline())
        return False

    def workers(self) -> list[psutil.Process]:
        """Return the loader workers of all ranks."""
        found = []
        for rank in self.ranks():
            with suppress(psutil.Error):
                found += rank.children()
        return found

    def kill(self, processes: Sequence[psutil.Process]) -> None:
        """Kill and count the processes that are still alive."""
        for process in processes:
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    process.kill()
                    self.kills += 1

    def wait_for(self, condition: Callable[[], object]) -> bool:
        """Wait until a condition is true; return False if the command ended first."""
        while not condition():
            if self.over or time.monotonic() > self.start + LIMIT_SECONDS:
                return False
            time.sleep(LOOK_SECONDS)
        return True

    def end(self) -> str:
        """Wait for the end; return the fingerprint, or "" if the run failed."""
        try:
            status = self.popen.wait(max(1.0, self.start + LIMIT_SECONDS - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.popen.terminate()
            status = self.popen.wait()
        self.output.close()
        result = self.folder / "out" / "result.json"
        if status or not result.exists():
            return ""
        return str(json.loads(result.read_text())["weights_sha256"])


def undisturbed(folder: Path, case: Case, *, torchrun: bool = False) -> Reference:
    """Run a case without kills."""
    running = Running(folder, case, torchrun=torchrun)
    running.wait_for(running.ranks)
    times = [time.monotonic()]
    for mark in ("loop", "first-step", "ninth-step"):
        running.wait_for(lambda mark=mark: running.has(mark))  # type: ignore[misc]
        times.append(time.monotonic())
    fingerprint = running.end()
    if not fingerprint:
        raise SystemExit(f"{case.name}: the undisturbed run failed\n{(folder / 'output').read_text()}")
    first, loop, stepped, ninth = times
    return Reference(fingerprint, stepped - first, ninth - loop, time.monotonic() - stepped)


def victims(processes: list[psutil.Process], chance: random.Random) -> list[psutil.Process]:
    """Choose the first process, the last, any one, or two."""
    if len(processes) < 2:
        return processes
    kind = chance.randrange(5)
    if kind < 2:
        return [processes[-kind]]  # the first, or the last
    return chance.sample(processes, 2) if kind == 2 else [chance.choice(processes)]


def early(running: Running, reference: Reference, chance: random.Random) -> None:
    """Kill before the first step, one to three times."""
    before: set[int] = set()
    for _ in range(chance.choice((1, 1, 2, 3))):
        if not running.wait_for_new(before):
            return
        before = running.pids()
        time.sleep(chance.uniform(0.0, reference.start))
        if running.has_stepped:
            return
        running.kill(victims(running.ranks(), chance))


def later(running: Running, reference: Reference, chance: random.Random) -> None:
    """Kill after the first step, one to three times; replacements can be killed, too."""
    running.wait_for(lambda: running.has_stepped)
    time.sleep(chance.uniform(0.0, 0.7 * reference.loop))  # leaves time for the kills
    for _ in range(chance.choice((1, 2, 3))):
        ranks = running.ranks()
        if not ranks:
            return
        running.kill([ranks[-1]] if chance.random() < 0.25 else victims(ranks, chance))
        time.sleep(chance.uniform(0.0, reference.start))


def checked(running: Running, reference: Reference, chance: random.Random) -> None:
    """Kill in the first nine steps, once or twice."""
    running.wait_for(lambda: running.has("loop"))
    for _ in range(chance.choice((1, 1, 2))):
        time.sleep(chance.uniform(0.0, reference.checked))
        if running.has("ninth-step"):
            return
        running.kill(victims(running.ranks(), chance))


def workers(running: Running, reference: Reference, chance: random.Random) -> None:
    """Kill loader workers."""
    running.wait_for(lambda: running.has_stepped)
    for _ in range(chance.choice((1, 2, 3))):
        time.sleep(chance.uniform(0.0, reference.loop / 3))
        alive = running.workers()
        running.kill(chance.sample(alive, 1) if alive else [])


def under_torchrun(running: Running, reference: Reference, chance: random.Random) -> None:
    """Kill one to three times, also during a restart. Each time torchrun restarts all processes."""
    for number in range(chance.choice((1, 2, 3))):
        before = running.pids() if number else set[int]()
        if not running.wait_for_new(before):
            return
        longest = reference.start if number else reference.start + reference.loop
        time.sleep(chance.uniform(0.0, longest))
        running.kill(victims(running.ranks(), chance))


KINDS = {"random": later, "early": early, "checked": checked, "workers": workers, "torchrun": under_torchrun}


def run_trial(kind: str, case: Case, reference: Reference, folder: Path, seed: str) -> Trial:
    """Run a case with kills."""
    running = Running(folder, case, torchrun=kind == "torchrun")
    KINDS[kind](running, reference, random.Random(seed))
    fingerprint = running.end()
    problem = ""
    if fingerprint != reference.fingerprint:
        error = "another fingerprint" if fingerprint else "no result"
        problem = f"{error} (seed {seed})\n{(folder / 'output').read_text(errors='replace')}"
    return Trial(kind, case, running.kills, time.monotonic() - running.start, problem)


def cases(kind: str) -> Sequence[Case]:
    """Return the cases that a kind of trial chooses from."""
    special = {"workers": (WORKERS,), "torchrun": TORCHRUN, "checked": (*CASES, *[SHARDS] * len(CASES))}
    return special.get(kind, CASES)


def series(kind: str, wanted: int, folder: Path, seed: int, at_once: int) -> list[Trial]:
    """Run trials until there are `wanted` kills (under torchrun: `wanted` trials with kills)."""
    chance, trials, number = random.Random(f"{seed} {kind}"), list[Trial](), 0
    reference = dict[Case, Reference]()

    def count() -> int:
        return sum(bool(each.kills) if kind == "torchrun" else each.kills for each in trials)

    with ThreadPoolExecutor(at_once) as pool:
        while count() < wanted:
            drawn = [(number + i, chance.choice(cases(kind))) for i in range(at_once)]
            number += at_once
            for case in {case for _, case in drawn} - reference.keys():
                reference[case] = undisturbed(
                    folder / f"whole-{kind}-{len(reference)}", case, torchrun=kind == "torchrun"
                )
            jobs = [
                pool.submit(run_trial, kind, case, reference[case], folder / f"{kind}-{n}", f"{seed} {kind} {n}")
                for n, case in drawn
            ]
            for job in jobs:
                trials.append(job.result())
                if trials[-1].problem:
                    print(f"{kind}, {trials[-1].case.name}: {trials[-1].problem}", flush=True)
    return trials


def table(trials: Sequence[Trial]) -> str:
    """Format a row for each kind and layout."""
    rows = [f"{'kills':10} {'layout':28} {'runs':>5} {'kills':>6} {'same':>6} {'other':>5} {'seconds':>8}"]
    for kind in KINDS:
        for case in dict.fromkeys(cases(kind)):
            group = [each for each in trials if (each.kind, each.case) == (kind, case)]
            if group:
                same = sum(not each.problem for each in group)
                numbers = f"{len(group):5} {sum(each.kills for each in group):6} {same:6} {len(group) - same:5}"
                rows.append(f"{kind:10} {case.name:28} {numbers} {sum(each.seconds for each in group):8.0f}")
    same = sum(not each.problem for each in trials)
    kills = sum(each.kills for each in trials)
    rows.append(f"{len(trials)} runs, {kills} kills: {same} with the right fingerprint")
    return "\n".join(rows)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind in KINDS:
        flags.add_argument(f"--{kind}", type=int, default=None, metavar="N")
    flags.add_argument("--at-once", type=int, default=1, metavar="N", help="runs at the same time")
    flags.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of all runs")
    flags.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    args = flags.parse_args()
    MORE_SETTINGS.extend(args.set)
    counts = {kind: getattr(args, kind) for kind in KINDS}
    counts = {kind: (8 if set(counts.values()) == {None} else 0) if n is None else n for kind, n in counts.items()}
    print(f"seed {args.seed}; {line()}", flush=True)
    start, trials = time.monotonic(), list[Trial]()
    with tempfile.TemporaryDirectory(prefix="k-") as name:
        os.environ["TMPDIR"] = name  # files that killed processes leave are removed with it
        for kind, wanted in counts.items():
            if wanted:
                trials += series(kind, wanted, Path(name), args.seed, args.at_once)
    print(table(trials))
    print(f"{time.monotonic() - start:.0f} s")
    sys.exit(any(each.problem for each in trials))


if __name__ == "__main__":
    main()
