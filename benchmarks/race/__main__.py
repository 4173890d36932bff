"""Run all parts of the race and write benchmarks/RESULTS.md.

    make bench                                                     builds the peers' environment, runs all benchmarks
    python -m benchmarks.race --peers .venv-peers/bin/python       about an hour
    python -m benchmarks.race --peers PYTHON --only GPT-2          repeats one part; the others stay in the file
    python -m benchmarks.race --peers PYTHON --quick               a smoke test: nothing is written

Everything runs in the peers' Python, in which Unisono is installed, too, with one torch thread per process. On a shared
machine, look at ratios and quartiles: a ratio is the median, over turns, of an arm over plain torch in the same turn.
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
"""On one process: a network so small that a step is Python and dispatch; and whether its data is a TensorDataset."""
TWO = [("GPT", 2), ("GPT", 8), ("CNN", 2), ("CNN", 8)]
"""On two processes: the model, and the number of virtual ranks (micro-batches of all processes in a step)."""
ROUNDS = {"GPT": (8, 9), "CNN": (6, 14)}
"""The number of times that processes are started, and their number of turns."""


class Race:
    """Measures and formats the parts of the page. `peers` is a Python in which the other libraries are installed."""

    def __init__(self, peers: str, *, quick: bool) -> None:
        self.peers, self.quick = peers, quick
        self.lines: list[str] = []

    # -- measurements

    def _run(self, command: Sequence[str], word: str) -> Any:
        """Run a command, and return the JSON that it prints after `word`."""
        process = subprocess.run(
            command,
            cwd=ROOT,
            env=inherited({"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
        found = [line.removeprefix(f"{word} ") for line in process.stdout.splitlines() if line.startswith(f"{word} ")]
        if not found:
            raise RuntimeError(f"{' '.join(command)} printed no result:\n{process.stdout}\n{process.stderr}")
        return json.loads(found[-1])

    def _torchrun(self, size: int) -> list[str]:
        return [self.peers, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), "-m"]

    def laps(self, size: int, rounds: int, **spec: Any) -> dict[str, list[float]]:
        """Return the seconds per step of each arm, over several starts."""
        seconds: dict[str, list[float]] = {}
        for i in range(rounds):
            launcher = [self.peers, "-m"] if size == 1 else self._torchrun(size)
            found = self._run([*launcher, "benchmarks.race.laps", json.dumps({**spec, "start": i})], "laps")
            for arm, difference in found["difference"].items():
                if not difference <= 0.05 * found["distance"]:
                    raise AssertionError(f"{arm} and plain torch have different results: {found['difference']}")
            for arm, column in found["seconds"].items():
                seconds.setdefault(arm, []).extend(column)
        return seconds

    def alone(self, arm: str, task: str) -> tuple[float, float]:
        """Return the seconds from the command to the end of all first steps, and the MiB of the largest process."""
        start = time.time()
        if arm == OURS:
            script = ROOT / "benchmarks" / "race" / "script.py"
            batch = {"GPT": 16, "CNN": 32}[task]
            with tempfile.TemporaryDirectory() as folder:
                command = [str(Path(self.peers).parent / "unisono"), "run", str(script), "--ranks", "2"]
                command += ["--run-dir", f"{folder}/run", "--set", f"task={task}", "--set", f"batch={batch}"]
                result = self._run(command, "alone")
        else:
            result = self._run([*self._torchrun(2), "benchmarks.race.alone", arm, task], "alone")
        return result["first"] - start, result["peak"]

    # -- the page

    def write(self, *lines: str) -> None:
        """Print lines, and keep them for the page."""
        self.lines += lines
        print("\n".join(lines), flush=True)

    def table(self, columns: dict[str, list[float]], unit: float, digits: int) -> None:
        """Write a row per arm, with ratios to plain torch: of turns, and of the quickest turns."""
        hand = columns[HAND]
        ratios = {arm: ratio(column, hand) for arm, column in columns.items()}
        self.write("| | median (quartiles) | least | more than by hand | ratio of turns | ratio of least |")
        self.write("|---|---|---|---|---|---|")
        for arm in sorted(columns, key=lambda name: (name != HAND, ratios[name].median)):
            column = [value * unit for value in columns[arm]]
            more = spread([unit * (a - b) for a, b in zip(columns[arm], hand, strict=True)])
            over_hand = f"{more.median:+.{digits}f} | {ratios[arm]:.3f} | {min(columns[arm]) / min(hand):.3f}"
            over_hand = over_hand if arm != HAND else " | | "
            name = f"**{arm}**" if arm.startswith(OURS) else arm
            quickest = f"{min(column):.{digits}f}"
            self.write(f"| {name} | {spread(column):.{digits}f} | {quickest} | {over_hand} |")
        self.write("")

    def overhead(self) -> None:
        self.write(
            "## Overhead per step: one process, batch 8, no accumulation, AdamW",
            "",
            "Networks so small that a step is Python and dispatch: microseconds per step, in turns of 150 steps.",
            "",
        )
        for task, rows in ONE:
            data = "a TensorDataset" if rows else "a custom data set"
            self.write(f"{task}, {data}:", "")
            turns, steps = (3, 20) if self.quick else (40, 150)
            self.table(self.laps(1, 1, task=task, virtual_ranks=1, turns=turns, steps=steps, rows=rows), 1e6, 0)

    def steps(self, task: str, virtual_ranks: int) -> None:
        self.write(f"## Step time on two processes: {task}, V = {virtual_ranks}", "", "Milliseconds per step.", "")
        rounds, turns = (1, 2) if self.quick else ROUNDS[task]
        self.table(self.laps(2, rounds, task=task, virtual_ranks=virtual_ranks, turns=turns), 1e3, 0)

    def starts(self) -> None:
        self.write(
            "## Time to the first step, and memory: two new processes for each arm",
            "",
            "Seconds from the command (torchrun; Unisono: `unisono run`) to the end of the first step of the CNN on "
            "both processes; then the peak resident memory of the larger process, in MiB, including libraries "
            "(GPT, V = 2, 4 steps). Shared memory counts in both processes.",
            "",
        )
        arms = [HAND, OURS, *MODULES]
        first: dict[str, list[float]] = {arm: [] for arm in arms}
        for i in range(3 if self.quick else 6):
            for arm in arms if i % 2 else reversed(arms):
                first[arm].append(self.alone(arm, "CNN")[0])
        self.table({arm: column[1:] for arm, column in first.items()}, 1.0, 2)  # the first one finds cold files
        self.table({arm: [self.alone(arm, "GPT")[1] for _ in range(2)] for arm in arms}, 1.0, 0)

    def imports(self) -> None:
        self.write("## Import", "", "Milliseconds of `python -c 'import ...'`; baseline: `import torch`.", "")
        lines = {"by hand": "import torch", "Unisono": "import unisono", "Unisono and torch": "import unisono, torch"}
        lines |= {arm: f"import {module}" for arm, module in MODULES.items()}
        seconds: dict[str, list[float]] = {name: [] for name in lines}
        for i in range(3 if self.quick else 7):
            for name in lines if i % 2 else reversed(lines):
                start = time.perf_counter()
                subprocess.run([self.peers, "-c", lines[name]], check=True, capture_output=True)
                seconds[name].append(time.perf_counter() - start)
        self.table({name: column[1:] for name, column in seconds.items()}, 1e3, 0)

    def describe_machine(self) -> str:
        """Describe the machine, and the versions in the peers' Python."""
        versions = (
            "import importlib.metadata as m; "
            "print(', '.join(f'{n} {m.version(n)}' for n in ('accelerate', 'lightning', 'pytorch-ignite')))"
        )
        commands = [[self.peers, "-m", "benchmarks.machine"], [self.peers, "-c", versions]]
        processes = [subprocess.run(c, cwd=ROOT, check=True, capture_output=True, text=True) for c in commands]
        return "; ".join(process.stdout.strip() for process in processes)


HEAD = """# Comparison with other libraries

Plain torch, other libraries and Unisono train the same model with the same data, precision (fp32), threads (one per
process), batch and AdamW, in alternating turns in the same processes. Each library is used as its documentation advises
([arms.py](race/arms.py)). A ratio is the median (quartiles), over turns, of an arm over plain torch in the same turn.
Other load on the machine can only make turns longer, so the quickest turns are compared as well. All arms end with the
same weights, up to rounding. Each part names its machine. `python -m benchmarks.race` writes this page.

On two processes, *by hand* is DistributedDataParallel with no_sync and gradient_as_bucket_view. V is the number of
micro-batches of both processes in a step, in Unisono the virtual ranks. Ignite's trainer does not support no_sync.
"""
PARTS: dict[str, Callable[[Race], None]] = {
    "overhead": Race.overhead,
    **{f"{task}-{v}": partial(Race.steps, task=task, virtual_ranks=v) for task, v in TWO},
    "starts": Race.starts,
    "imports": Race.imports,
}


def render(new: dict[str, str]) -> str:
    """Return the page with these parts replaced. HTML comments separate the parts."""
    old = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else ""
    parts = {name: old.partition(f"<!-- {name} -->\n")[2].partition("\n<!--")[0].rstrip("\n") for name in PARTS}
    return HEAD + "".join(f"\n<!-- {name} -->\n{text}\n" for name in PARTS if (text := {**parts, **new}[name]))


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--peers", required=True, help="a Python that has accelerate, lightning, ignite, greenlet")
    flags.add_argument("--only", choices=list(PARTS), help="one part")
    args = flags.parse_args()
    # Not resolved: a virtual environment's python is a symbolic link, which determines where libraries are found.
    race = Race(str(Path(args.peers).absolute()), quick=args.quick)
    for part in [args.only] if args.only else PARTS:
        race.lines.clear()
        machine = race.describe_machine()  # with the load before the measurement
        PARTS[part](race)
        race.write(f"{machine}.")
        if not args.quick:
            RESULTS.write_text(render({part: "\n".join(race.lines)}), encoding="utf-8")


if __name__ == "__main__":
    main()
