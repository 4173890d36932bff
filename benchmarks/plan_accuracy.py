"""Compare what `unisono plan` predicts with what runs take: peak memory and step time of every placement in the plan.

    python -m benchmarks.plan_accuracy --folder build/plan-accuracy     a stopped benchmark continues there
    python -m benchmarks.plan_accuracy --models text gpt2 --rounds 1
    python -m benchmarks.plan_accuracy --quick                          a smoke test

Each round plans a model with `unisono plan`. Each placement also runs as the plan says to type it, right after its
first short run in the plan, or after that of the placement that its time is added up from (interleaved_plan.py). So a
machine whose speed changes within minutes affects both. An error is the median over rounds of a prediction over what
the run of the same round took. A run counts the time of the slowest process, and the memory of the largest one.
Afterwards the first choices of the plans and the placements that were measured close to the best one run in turns: the
choice counts by the median over turns of its time over that of another placement in the same turn. Run it on an
otherwise idle machine. If its speed varies within seconds, measure more steps (--steps).

    memory     limit 10 %
    step       limit 15 %
    choice     step time of a plan's first choice over that of the best placement: limit 1.05
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from benchmarks.interleaved_plan import Measured, measured, output_of
from benchmarks.machine import parser, show
from unisono.costs.recorded_costs import WARM_UP

SCRIPT = "benchmarks/plan_accuracy_script.py"
MEMORY_LIMIT, STEP_LIMIT, CHOICE_LIMIT = 0.10, 0.15, 1.05
RANKS, STEPS, ROUNDS, TURNS = 4, 7, 2, 9
CLOSE, MOST_CLOSE = 1.2, 4


class Case(NamedTuple):
    """A model that is planned.

    Attributes:
        target: The recipe or script.
        sets: Its settings.
        recompute: Whether placements with recomputed activations are run, too. They are the slower ones.
        offload: Whether placements with shards in the memory of the host are planned and run, too.
    """

    target: str
    sets: tuple[str, ...]
    recompute: bool = False
    offload: bool = False

    def runs(self, placement: str) -> bool:
        """Return whether a placement is run."""
        return self.recompute or "recompute" not in placement


TEXT = ("sample_bytes=0", "validate_bytes=2000")
CASES: Mapping[str, Case] = {
    "text": Case("text", (*TEXT, "batch=32", "model.width=256"), recompute=True, offload=True),
    "image": Case("image", ("source=digits", "batch=256", "epochs=10")),
    "speech": Case("speech", ("batch=64",)),
    "topics": Case("topics", ("batch=256", "width=256")),
    "resnet": Case(SCRIPT, ("kind=resnet", "batch=32", "depth=1"), recompute=True),
    "gpt2": Case(SCRIPT, ("kind=gpt2", "batch=32", "width=384"), offload=True),
    "llama": Case(SCRIPT, ("kind=llama", "batch=32", "width=384"), recompute=True),
}
QUICK: Mapping[str, Case] = {"text": Case("text", (*TEXT, "batch=8", "model.width=16", "model.depth=1"))}


class Round(TypedDict):
    """A plan as JSON, and what was measured, by the placement."""

    plan: dict[str, Any]
    runs: dict[str, Measured]


def interleaved(case: Case, ranks: int, steps: int, only: Sequence[str]) -> Round:
    """Plan a model, and run its placements meanwhile."""
    sets = [word for each in case.sets for word in ("--set", each)]
    more = ["--offload"] if case.offload else []
    words = ["plan", case.target, "--ranks", str(ranks), "--steps", str(steps), "--json", *more, *sets]
    again = ["--recompute"] if case.recompute else []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "runs.json")
        plan: dict[str, Any] = json.loads(
            output_of("benchmarks.interleaved_plan", [str(file), *again, *words]).splitlines()[-1]
        )
        during: dict[str, Measured] = json.loads(file.read_text(encoding="utf-8"))
    lines = {each["placement"]: each["line"] for each in plan["candidates"] if case.runs(each["placement"])}
    chosen = [placement for placement in lines if not only or placement in only]
    return {"plan": plan, "runs": {each: during.get(each) or measured(lines[each], steps) for each in chosen}}


class Amount(NamedTuple):
    """How much is measured: processes and steps of a run, rounds, and turns of the quickest placements."""

    ranks: int
    steps: int
    rounds: int
    turns: int


def measure(name: str, case: Case, folder: Path, amount: Amount, only: Sequence[str]) -> dict[str, Any]:
    """Plan a model and run its placements, in rounds, and return both. What the folder holds is not repeated."""
    file = folder / f"{name}.json"
    kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"rounds": [], "turns": []}
    while len(kept["rounds"]) < amount.rounds:
        kept["rounds"].append(interleaved(case, amount.ranks, amount.steps, only))
        file.write_text(json.dumps(kept) + "\n", encoding="utf-8")
    rounds: list[Round] = kept["rounds"]
    lines = {each["placement"]: each["line"] for each in rounds[0]["plan"]["candidates"]}
    close = close_placements(rounds)
    for number in range(len(kept["turns"]), amount.turns):
        order = close[number % len(close) :] + close[: number % len(close)]
        kept["turns"].append({placement: measured(lines[placement], amount.steps)["step"] for placement in order})
        file.write_text(json.dumps(kept) + "\n", encoding="utf-8")
    return rows_of(name, rounds, kept["turns"])


def median_of(rounds: Sequence[Round], placement: str, part: str) -> float:
    """Return the median over rounds of what the runs of a placement took."""
    return statistics.median(each["runs"][placement][part] for each in rounds)


def close_placements(rounds: Sequence[Round]) -> list[str]:
    """Return the first choices of the plans, and the placements that were measured close to the best one."""
    steps = {placement: median_of(rounds, placement, "step") for placement in rounds[0]["runs"]}
    quickest = sorted(steps, key=lambda placement: steps[placement])[:MOST_CLOSE]
    close = [placement for placement in quickest if steps[placement] <= CLOSE * steps[quickest[0]]]
    return list(dict.fromkeys([*choices_of(rounds), *close]))


def choices_of(rounds: Sequence[Round]) -> list[str]:
    """Return the first choice of each plan, of the placements that were run."""
    in_order = [[each["placement"] for each in found["plan"]["candidates"]] for found in rounds]
    return [next(each for each in plan if each in rounds[0]["runs"]) for plan in in_order]


def predicted(found: Round, placement: str) -> dict[str, Any]:
    """Return what the plan of a round says about a placement."""
    entry: dict[str, Any] = next(each for each in found["plan"]["candidates"] if each["placement"] == placement)
    return entry


def rows_of(name: str, rounds: Sequence[Round], turns: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return predictions beside measurements, quickest placement first, and what the choices of the plans cost."""
    rows = []
    for placement in rounds[0]["runs"]:
        plans = [predicted(each, placement) for each in rounds]
        row: dict[str, Any] = {"model": name, "placement": placement, "processes": plans[0]["processes"]}
        for part, key in (("memory", "memory"), ("step", "step_seconds")):
            pairs = [(plan[key], each["runs"][placement][part]) for plan, each in zip(plans, rounds, strict=True)]
            row |= {part: median_of(rounds, placement, part)}
            row |= {f"{part}_predicted": statistics.median(plan for plan, _ in pairs)}
            row |= {f"{part}_error": statistics.median(plan / run for plan, run in pairs) - 1}
        rows.append(row)
    turns = turns or [{row["placement"]: row["step"] for row in rows}]
    return {
        "rows": sorted(rows, key=lambda row: float(row["step_predicted"])),
        "choice": statistics.median(cost_of(placement, turns) for placement in choices_of(rounds)),
        "turns": {each: statistics.median(turn[each] for turn in turns) for each in turns[0]},
        "notes": sorted({note for each in rounds for note in each["plan"]["notes"]}),
    }


def cost_of(choice: str, turns: Sequence[dict[str, float]]) -> float:
    """Return the time of a placement over that of the best one: the largest of the medians of ratios in one turn."""
    return max(statistics.median(turn[choice] / turn[other] for turn in turns) for other in turns[0])


def summary(models: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return how many rows are within the limits, and the largest errors."""
    rows = [row for model in models.values() for row in model["rows"]]
    found: dict[str, Any] = {"rows": len(rows)}
    for part, limit in (("memory", MEMORY_LIMIT), ("step", STEP_LIMIT)):
        errors = [abs(row[f"{part}_error"]) for row in rows]
        found |= {
            f"{part}_within": sum(error <= limit for error in errors),
            f"{part}_largest": max(errors),
            f"{part}_median": statistics.median(errors),
        }
    found["choices_within"] = sum(model["choice"] <= CHOICE_LIMIT for model in models.values())
    return found


def table(models: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the figures as a table in Markdown."""
    lines = ["| model | placement | memory, MB: predicted | measured | error | step, s: predicted | measured | error |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in (row for model in models.values() for row in model["rows"]):
        memory = f"{row['memory_predicted'] / 1e6:.0f} | {row['memory'] / 1e6:.0f} | {row['memory_error']:+.1%}"
        step = f"{row['step_predicted']:.3g} | {row['step']:.3g} | {row['step_error']:+.1%}"
        lines.append(f"| {row['model']} | {row['placement']} | {memory} | {step} |")
    found = summary(models)
    count = found["rows"]
    choices = ", ".join(f"{name} {model['choice']:.3f}" for name, model in models.items())
    lines += [
        "",
        f"Memory: {found['memory_within']} of {count} within {MEMORY_LIMIT:.0%}, median {found['memory_median']:.1%}, "
        f"largest {found['memory_largest']:.1%}.",
        f"Step: {found['step_within']} of {count} within {STEP_LIMIT:.0%}, median {found['step_median']:.1%}, "
        f"largest {found['step_largest']:.1%}.",
        f"First choice over the best measured: {choices}; {found['choices_within']} of {len(models)} within "
        f"{CHOICE_LIMIT}.",
    ]
    return "\n".join(lines)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--models", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help=", ".join(CASES))
    flags.add_argument("--folder", type=Path, help="keep plans and runs here, and continue with those that it holds")
    flags.add_argument("--rounds", type=int, default=ROUNDS, help="plans, and runs of each placement")
    flags.add_argument("--steps", type=int, default=STEPS, help="least number of steps of runs and trials")
    flags.add_argument("--turns", type=int, default=TURNS, help="runs of the quickest placements, in turns")
    flags.add_argument("--only", nargs="+", default=(), help="run these placements, by their names in the plan")
    args = flags.parse_args()
    cases = QUICK if args.quick else {name: CASES[name] for name in args.models}
    amount = Amount(2, WARM_UP + 1, 1, 1) if args.quick else Amount(RANKS, args.steps, args.rounds, args.turns)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        models = {name: measure(name, case, folder, amount, args.only) for name, case in cases.items()}
    show("plan_accuracy", {"models": models, "summary": summary(models)}, lambda: table(models), as_json=args.json)


if __name__ == "__main__":
    main()
