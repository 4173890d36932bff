"""Kill studies of `unisono tune`, prune their trials, move trials to free processes, and train populations.

    python -m benchmarks.tuning --part kills        a study of 30 trials, undisturbed on one process; then the same
                                                    study killed ten times (SIGKILL to its process group) at random
                                                    moments, and resumed on one to four processes
    python -m benchmarks.tuning --part pruning      the same study with each pruner: the steps that it saves, and the
                                                    best value beside the spread of the best trial over seeds
    python -m benchmarks.tuning --part moving       two trials of the text recipe, of one block and of eight, on two
                                                    processes, with and without moves: seconds, in alternation
    python -m benchmarks.tuning --part population   a population of eight, and eight independent trials as long:
                                                    the best value of each, for several study seeds

The exit status is 1 if trials of a study that was killed, or whose trials moved, differ in settings, state, values,
steps or fingerprint of the weights from those of the other study. Figures of `moving` need an idle machine.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.machine import parser, python_path, ratio, show
from unisono.environment import inherited

SCRIPT = str(Path(__file__).with_name("tuning_script.py"))
SEARCH = ("lr=log(1e-4,1)", "depth=[1,2,3]", "width=linear(16,128,16)", "decay=log(1e-4,1)")
PARTS = ("kills", "pruning", "moving", "population")
PRUNERS = ("median", "hyperband", "successivehalving")
KEPT = ("trial", "state", "settings", "values", "steps", "total", "reason", "weights_sha256")
"""What must be equal for each trial."""


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start the command in a process group of its own. Its output is in FOLDER/screen."""
    with (folder / "screen").open("ab") as screen:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "unisono.cli.main", "tune", *words],
            cwd=folder,
            env=inherited({"PYTHONPATH": python_path()}),
            stdout=screen,
            stderr=screen,
            start_new_session=True,
        )


def study(folder: Path, *words: str) -> dict[str, Any]:
    """Run a study to its end, and return its result.json with the seconds that it took.

    A study in the folder that has ended is not repeated. One that was interrupted starts again.
    """
    kept = folder / "result.json"
    if kept.is_file():
        found: dict[str, Any] = json.loads(kept.read_text())
        return found
    if "--resume" not in words:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    status = start(folder, *words, "--run-dir", "out").wait()
    if status:
        raise SystemExit(f"unisono tune {' '.join(words)} exited with status {status}: {folder / 'screen'}")
    seconds = time.perf_counter() - began
    found = {**json.loads((folder / "out" / "result.json").read_text()), "wall_seconds": seconds}
    kept.write_text(json.dumps(found))
    return found


def flags(name: str, values: Sequence[str]) -> list[str]:
    """Return a flag for each value."""
    return [word for value in values for word in (f"--{name}", value)]


def trials_of(result: Mapping[str, Any]) -> list[list[Any]]:
    """Return what must be equal for each trial of two studies."""
    return [[trial.get(name) for name in KEPT] for trial in result["trials"]]


def kills(folder: Path, trials: int, count: int, seed: int, longest: float) -> dict[str, Any]:
    """Compare a study that was killed with an undisturbed one."""
    words = [SCRIPT, *flags("search", SEARCH), "--minimize", "valid", "--trials", str(trials)]
    words += ["--set", "checkpoint.every=20"]
    pool = ThreadPoolExecutor(1)  # the undisturbed study runs beside the other one: no time is measured
    alone = pool.submit(study, folder / "alone", *words)
    draw, killed, places = random.Random(seed), 0, list[int]()
    there = folder / "killed"
    shutil.rmtree(there, ignore_errors=True)
    there.mkdir(parents=True)
    while killed < count:
        places.append(draw.randint(1, 4))
        resume = ["--resume"] if (there / "out" / "study.json").exists() else []
        process = start(there, *words, "--ranks", str(places[-1]), "--run-dir", "out", *resume)
        try:
            process.wait(draw.uniform(longest / 4, longest))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            killed += 1
            continue
        break  # it has ended
    places.append(draw.randint(1, 4))
    found = study(there, *words, "--ranks", str(places[-1]), "--resume")
    expected = alone.result()
    states = [trial["state"] for trial in expected["trials"]]
    return {
        "trials": trials,
        "kills": killed,
        "processes": places,
        "states": {state: states.count(state) for state in sorted(set(states))},
        "same": trials_of(found) == trials_of(expected),
        "saved": 1 - expected["steps"] / expected["steps_without_pruning"],
        "best": expected["trials"][expected["best"][0]]["values"][0],
        "promise": found["promise"],
    }


def pruning(folder: Path, trials: int, pruners: Sequence[str], seeds: Sequence[int], processes: int) -> dict[str, Any]:
    """Compare studies with and without pruning."""
    rows = []
    for seed in seeds:
        for pruner in ("none", *pruners):
            words = [SCRIPT, *flags("search", SEARCH), "--minimize", "valid", "--trials", str(trials)]
            words += ["--pruner", pruner, "--study-seed", str(seed), "--ranks", str(processes)]
            found = study(folder / f"{pruner}-{seed}", *words)
            best = found["trials"][found["best"][0]]
            share = 1 - found["steps"] / found["steps_without_pruning"]
            rows.append({"pruner": pruner, "seed": seed, "saved": share, "best": best["values"][0], "trial": best})
            print(f"{pruner} {seed}: {share:.1%} saved, best {best['values'][0]:.4f}", file=sys.stderr, flush=True)
    noise = []
    for row in (row for row in rows if row["pruner"] == "none"):
        sets = [f"{name}={value}" for name, value in row["trial"]["settings"].items()]
        words = [SCRIPT, "--search", "seed=[1,2,3,4,5]", "--sampler", "grid", "--trials", "5", "--pruner", "none"]
        words += [*flags("set", sets), "--minimize", "valid", "--ranks", str(processes)]
        values = [trial["values"][0] for trial in study(folder / f"noise-{row['seed']}", *words)["trials"]]
        noise.append({"seed": row["seed"], "values": values, "deviation": statistics.stdev(values)})
    return {"rows": rows, "noise": noise}


def moving(folder: Path, steps: int, rounds: int) -> dict[str, Any]:
    """Compare studies whose trials move with those whose trials do not."""
    words = ["text", "--search", "model.depth=[1,8]", "--sampler", "grid", "--trials", "2", "--round-size", "2"]
    sets = [f"steps={steps}", "validate_bytes=8192", "sample_bytes=0"]
    words += [*flags("set", sets), "--pruner", "none", "--ranks", "2"]
    found: dict[str, list[dict[str, Any]]] = {"moving": [], "fixed": []}
    for number in range(rounds):
        for name in ("moving", "fixed") if number % 2 else ("fixed", "moving"):
            found[name].append(study(folder / f"{name}-{number}", *words, *(["--no-move"] if name == "fixed" else [])))
    results = [trials_of(each) for each in (*found["moving"], *found["fixed"])]
    seconds = {name: [each["wall_seconds"] for each in studies] for name, studies in found.items()}
    return {
        "seconds": seconds,
        "ratio": ratio(seconds["fixed"], seconds["moving"])
        if rounds > 1
        else seconds["fixed"][0] / seconds["moving"][0],
        "moves": [each["moves"] for each in found["moving"]],
        "move_seconds": [each["move_seconds"] for each in found["moving"]],
        "same": all(each == results[0] for each in results),
    }


def population(folder: Path, steps: int, seeds: Sequence[int], processes: int) -> dict[str, Any]:
    """Compare populations with as many independent trials: settings that may change while a run trains."""
    words = [SCRIPT, *flags("search", ("lr=log(1e-4,1)", "decay=log(1e-4,1)")), "--minimize", "valid"]
    words += ["--set", f"steps={steps}", "--ranks", str(processes)]
    ways = {
        "population": ["--population", "8", "--interval", str(max(steps // 10, 2))],
        "random": ["--trials", "8", "--sampler", "random", "--pruner", "none"],
        "tpe": ["--trials", "8", "--sampler", "tpe", "--pruner", "none"],
    }
    rows = []
    for seed in seeds:
        row: dict[str, Any] = {"seed": seed}
        for name, more in ways.items():
            found = study(folder / f"{name}-{seed}", *words, *more, "--study-seed", str(seed))
            members = found["members"] if name == "population" else found["trials"]
            values = [each["value"] if name == "population" else each["values"][0] for each in members]
            row[name] = min(value for value in values if value is not None)
        rows.append(row)
    best = {name: statistics.median(row[name] for row in rows) for name in ways}
    wins = {name: sum(row["population"] < row[name] for row in rows) for name in ("random", "tpe")}
    return {"steps": steps, "rows": rows, "median": best, "wins": wins}


def verdict(part: Mapping[str, Any]) -> str:
    """Return whether the results were equal, in words."""
    return "the same results" if part["same"] else "OTHER RESULTS"


def table(figures: Mapping[str, Any]) -> str:
    """Format the parts that were measured."""
    lines = []
    if part := figures.get("kills"):
        states = ", ".join(f"{count} {state}" for state, count in part["states"].items())
        lines.append(
            f"kills: {part['trials']} trials ({states}), {part['kills']} kills, on {part['processes']} processes: "
            f"{verdict(part)}, promise {part['promise']}"
        )
    if part := figures.get("pruning"):
        lines.append("pruner              seed  saved   best")
        for row in part["rows"]:
            lines.append(f"{row['pruner']:18}  {row['seed']:4}  {row['saved']:5.1%}  {row['best']:.4f}")
        for row in part["noise"]:
            lines.append(
                f"best of none, seed {row['seed']}, by five seeds of the run: deviation {row['deviation']:.4f}"
            )
    if part := figures.get("moving"):
        fixed, moving = (", ".join(f"{s:.0f}" for s in part["seconds"][name]) for name in ("fixed", "moving"))
        lines.append(f"moving: {part['ratio']:.2f} times sooner ({fixed} s without moves, {moving} s with them)")
        lines.append(f"        {part['moves']} moves of {part['move_seconds']} s: {verdict(part)}")
    if part := figures.get("population"):
        lines.append(f"{part['steps']} steps: best value of    population  random     tpe")
        for row in [*part["rows"], {"seed": "median", **part["median"]}]:
            values = "  ".join(f"{row[name]:10.4f}" for name in ("population", "random", "tpe"))
            lines.append(f"{'seed ' if row['seed'] != 'median' else ''}{row['seed']!s:20}  {values}")
        wins = ", ".join(f"{name} {count} of {len(part['rows'])}" for name, count in part["wins"].items())
        lines.append(f"the population is better than: {wins}")
    return "\n".join(lines)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--part", choices=PARTS, action="append", help="only this part; repeatable, in this order")
    options.add_argument("--trials", type=int, default=30)
    options.add_argument("--kills", type=int, default=10)
    options.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    options.add_argument("--longest", type=float, default=20, help="seconds before a kill; at least a quarter (20)")
    options.add_argument("--pruner", choices=PRUNERS, action="append", help="only this pruner; repeatable")
    options.add_argument("--study-seed", type=int, action="append", help="repeatable (0 and 1)")
    options.add_argument("--ranks", type=int, default=2, help="processes of studies with pruning (2)")
    options.add_argument("--steps", type=int, default=60, help="steps of trials that move (60)")
    options.add_argument("--population-steps", type=int, default=200, help="steps of members and their rivals (200)")
    options.add_argument("--rounds", type=int, default=2, help="studies with moves, and without (2)")
    options.add_argument("--folder", type=Path, help="keep the studies here; those that have ended are not repeated")
    args = options.parse_args()
    if args.quick:
        args.trials, args.kills, args.steps, args.rounds, args.population_steps = 4, 1, 6, 1, 10
        args.pruner, args.study_seed = args.pruner or ["median"], args.study_seed or [0]
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = (args.folder or Path(name)).absolute()
        measure = {
            "kills": lambda there: kills(there, args.trials, args.kills, args.seed, args.longest),
            "pruning": lambda there: pruning(
                there, args.trials, args.pruner or PRUNERS, args.study_seed or [0, 1], args.ranks
            ),
            "moving": lambda there: moving(there, args.steps, args.rounds),
            "population": lambda there: population(
                there, args.population_steps, args.study_seed or range(5), args.ranks
            ),
        }
        for part in args.part or PARTS:
            figures[part] = measure[part](folder / part)
            print(json.dumps({part: figures[part]}), file=sys.stderr, flush=True)
    show("tuning", figures, lambda: table(figures), as_json=args.json)
    if not all(part.get("same", True) for part in figures.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
