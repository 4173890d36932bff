"""The race, from its first start to benchmarks/RESULTS.md.

    make bench                                                     builds the peers' environment, runs this and the rest
    python -m benchmarks.race --peers .venv-peers/bin/python       about an hour
    python -m benchmarks.race --peers PYTHON --only GPT-2          one part again; the others stay as they are written
    python -m benchmarks.race --peers PYTHON --quick               a smoke test: nothing is written

Everything runs in the peers' Python, where Unisono is installed as well; one torch thread a process. On a machine that
others use, look at ratios and quartiles: each is the median, over turns, of an arm over plain torch in the same turn.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.machine import parser, ratio, spread
from benchmarks.race.arms import MODULES
from unisono.environment import inherited

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
SECONDS = 900.0
HAND, OURS = "by hand", "Unisono"

ONE = [("MLP 32-32-32", False), ("MLP 64-64-10", False), ("MLP 32-32-32", True), ("MLP 64-64-10", True)]
"""On one process: a network so small that a step is Python and dispatch; is its data a TensorDataset?"""
TWO = [("GPT", 2), ("GPT", 8), ("CNN", 2), ("CNN", 8)]
"""On two: the model, and how many virtual ranks (micro-batches of all processes in a step)."""
ROUNDS = {"GPT": (8, 9), "CNN": (6, 14)}
"""How often the processes are started anew, and for how many turns."""


class Race:
    """What was measured, and how it is told. `peers` is a Python where they are installed."""

    def __init__(self, peers: str, *, quick: bool) -> None:
        self.peers, self.quick = peers, quick
        self.lines: list[str] = []

    # -- what is started

    def _tell(self, command: Sequence[str], word: str) -> Any:
        """What a command prints behind `word`, as JSON."""
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=inherited({"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
        found = [line.removeprefix(f"{word} ") for line in done.stdout.splitlines() if line.startswith(f"{word} ")]
        if not found:
            raise RuntimeError(f"{' '.join(command)} told nothing:\n{done.stdout}\n{done.stderr}")
        return json.loads(found[-1])

    def _torchrun(self, size: int) -> list[str]:
        return [self.peers, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), "-m"]

    def laps(self, size: int, rounds: int, **heat: Any) -> dict[str, list[float]]:
        """Seconds a step of every arm, over several starts."""
        seconds: dict[str, list[float]] = {}
        for i in range(rounds):
            start = [self.peers, "-m"] if size == 1 else self._torchrun(size)
            found = self._tell([*start, "benchmarks.race.laps", json.dumps({**heat, "start": i})], "laps")
            for arm, apart in found["apart"].items():
                if not apart <= 0.05 * found["moved"]:
                    raise AssertionError(f"{arm} did not compute what plain torch did: {found['apart']}")
            for arm, column in found["seconds"].items():
                seconds.setdefault(arm, []).extend(column)
        return seconds

    def alone(self, arm: str, task: str) -> tuple[float, float]:
        """Seconds from the command to the first step that every process has done; MiB of the largest process."""
        began = time.time()
        if arm == OURS:
            script = ROOT / "benchmarks" / "race" / "script.py"
            batch = {"GPT": 16, "CNN": 32}[task]
            with tempfile.TemporaryDirectory() as folder:
                command = [str(Path(self.peers).parent / "unisono"), "run", str(script), "--ranks", "2"]
                command += ["--run-dir", f"{folder}/run", "--set", f"task={task}", "--set", f"batch={batch}"]
                told = self._tell(command, "alone")
        else:
            told = self._tell([*self._torchrun(2), "benchmarks.race.alone", arm, task], "alone")
        return told["first"] - began, told["peak"]

    # -- what is written

    def say(self, *lines: str) -> None:
        self.lines += lines
        print("\n".join(lines), flush=True)

    def table(self, columns: dict[str, list[float]], unit: float, digits: int) -> None:
        """A row an arm, over plain torch: turn by turn, and quickest turn to quickest turn."""
        hand = columns[HAND]
        ratios = {arm: ratio(column, hand) for arm, column in columns.items()}
        self.say("| | median (quartiles) | least | over by hand | ratio, turn by turn | least to least |")
        self.say("|---|---|---|---|---|---|")
        for arm in sorted(columns, key=lambda name: (name != HAND, ratios[name].median)):
            column = [value * unit for value in columns[arm]]
            more = spread([unit * (a - b) for a, b in zip(columns[arm], hand, strict=True)])
            told = f"{more.median:+.{digits}f} | {ratios[arm]:.3f} | {min(columns[arm]) / min(hand):.3f}"
            name = f"**{arm}**" if arm.startswith(OURS) else arm
            quickest = f"{min(column):.{digits}f}"
            self.say(f"| {name} | {spread(column):.{digits}f} | {quickest} | {told if arm != HAND else ' | | '} |")
        self.say("")

    def overhead(self) -> None:
        self.say(
            "## Overhead a step: one process, batch 8, no accumulation, AdamW",
            "",
            "Networks so small that a step is Python and dispatch: microseconds a step, in turns of 150 steps.",
            "",
        )
        for task, rows in ONE:
            data = "a TensorDataset" if rows else "a data set of one's own"
            self.say(f"{task}, {data}:", "")
            turns, steps = (3, 20) if self.quick else (40, 150)
            self.table(self.laps(1, 1, task=task, virtual_ranks=1, turns=turns, steps=steps, rows=rows), 1e6, 0)

    def steps(self, task: str, virtual_ranks: int) -> None:
        self.say(f"## A step on two processes: {task}, V = {virtual_ranks}", "", "Milliseconds a step.", "")
        rounds, turns = (1, 2) if self.quick else ROUNDS[task]
        self.table(self.laps(2, rounds, task=task, virtual_ranks=virtual_ranks, turns=turns), 1e3, 0)

    def starts(self) -> None:
        self.say(
            "## Time to the first step, and memory: two processes, each arm in new ones",
            "",
            "Seconds from the command (torchrun; ours: `unisono run`) until both have done a step of the CNN; then the"
            " resident memory of the larger process at its peak, in MiB, libraries included (GPT, V = 2, 4 steps); what"
            " two processes share counts in both.",
            "",
        )
        arms = [HAND, OURS, *MODULES]
        first: dict[str, list[float]] = {arm: [] for arm in arms}
        for i in range(3 if self.quick else 6):
            for arm in arms if i % 2 else reversed(arms):
                first[arm].append(self.alone(arm, "CNN")[0])
        self.table({arm: column[1:] for arm, column in first.items()}, 1.0, 2)  # the first finds cold files
        self.table({arm: [self.alone(arm, "GPT")[1] for _ in range(2)] for arm in arms}, 1.0, 0)

    def imports(self) -> None:
        self.say("## Import", "", "Milliseconds of `python -c 'import ...'`, beside `import torch`.", "")
        lines = {"by hand": "import torch", "Unisono": "import unisono", "Unisono, and torch": "import unisono, torch"}
        lines |= {arm: f"import {module}" for arm, module in MODULES.items()}
        taken: dict[str, list[float]] = {name: [] for name in lines}
        for i in range(3 if self.quick else 7):
            for name in lines if i % 2 else reversed(lines):
                began = time.perf_counter()
                subprocess.run([self.peers, "-c", lines[name]], check=True, capture_output=True)
                taken[name].append(time.perf_counter() - began)
        self.table({name: column[1:] for name, column in taken.items()}, 1e3, 0)

    def stand(self) -> str:
        """The machine, and the versions in the peers' Python."""
        versions = (
            "import importlib.metadata as m; "
            "print(', '.join(f'{n} {m.version(n)}' for n in ('accelerate', 'lightning', 'pytorch-ignite')))"
        )
        facts = [[self.peers, "-m", "benchmarks.machine"], [self.peers, "-c", versions]]
        told = [subprocess.run(f, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip() for f in facts]
        return "; ".join(told)


HEAD = """# The race

The same model, data, precision (fp32), threads (one a process) and batch through plain torch, its peers and Unisono, in
turns, in the same processes; every arm as its documentation advises ([arms.py](race/arms.py)), with AdamW. A ratio is
the median (quartiles), over turns, of an arm over plain torch in the same turn; what others do on the machine only
makes turns longer, so the quickest ones are set side by side as well. All arms end with the same weights, up to
rounding. Each part says what it was measured on; `python -m benchmarks.race` wrote it.

On two processes *by hand* is DistributedDataParallel with no_sync and gradient_as_bucket_view; V is how many
micro-batches both take together in a step, in ours the virtual ranks. Ignite's trainer has no place for no_sync.
"""
PARTS: dict[str, Callable[[Race], None]] = {
    "overhead": Race.overhead,
    **{f"{task}-{v}": partial(Race.steps, task=task, virtual_ranks=v) for task, v in TWO},
    "starts": Race.starts,
    "imports": Race.imports,
}


def written(new: dict[str, str]) -> str:
    """The page with these parts made anew, each between two marks that nobody sees."""
    old = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else ""
    parts = {name: old.partition(f"<!-- {name} -->\n")[2].partition("\n<!--")[0].rstrip("\n") for name in PARTS}
    return HEAD + "".join(f"\n<!-- {name} -->\n{text}\n" for name in PARTS if (text := {**parts, **new}[name]))


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--peers", required=True, help="a Python that has accelerate, lightning, ignite, greenlet")
    flags.add_argument("--only", choices=list(PARTS), help="one part")
    asked = flags.parse_args()
    # not resolved: a virtual environment's python is a link, and finds its libraries beside the link
    race = Race(str(Path(asked.peers).absolute()), quick=asked.quick)
    for part in [asked.only] if asked.only else PARTS:
        race.lines.clear()
        stand = race.stand()  # with the load that it begins under
        PARTS[part](race)
        race.say(f"{stand}.")
        if not asked.quick:
            RESULTS.write_text(written({part: "\n".join(race.lines)}), encoding="utf-8")


if __name__ == "__main__":
    main()
