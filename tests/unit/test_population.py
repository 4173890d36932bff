"""Population-based training: draws, copies, perturbed settings, and the schedule that a population finds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from unisono.checkpoint.manifest import MANIFEST
from unisono.cli.request.run_options import RunRequest
from unisono.cli.tuning.population.exploit_explore import (
    Rules,
    Turn,
    drawn,
    explored,
    first_turns,
    next_turns,
    perturbed,
    uniform,
)
from unisono.cli.tuning.population.lineage import Generation, Period, copy_lines, lines_of, result_of, schedule_of
from unisono.cli.tuning.population.member_segment import MemberSegment, SegmentResult, copy_checkpoint
from unisono.cli.tuning.population.population_flags import PopulationFlags, factors_of, problems_of_space
from unisono.cli.tuning.population.population_record import PopulationRecord
from unisono.cli.tuning.population.population_run import equals_of
from unisono.cli.tuning.search_space import Choice, Dimension, dimension_of
from unisono.cli.tuning.trial_process import TrialProcess
from unisono.config import CommandLine
from unisono.errors import StudyError

LINE = CommandLine(("unisono", "tune", "train.py", "--search", "lr=log(0.001,1)", "--population", "5"))
RULES = Rules(quantile=0.2, factors=(0.8, 1.2), resample=0.25, seed=3)
LR = Dimension("lr", "log", 0.001, 1.0)
DEPTH = Dimension("depth", "linear", 1, 9, whole=True)
DROP = Dimension("drop", "linear", 0.0, 0.5, 0.125)
KIND = Dimension("kind", "choices", choices=("a", "b", "c"))
SPACE = (LR, DEPTH, DROP, KIND)


def test_draws_cover_the_space() -> None:
    draws = {d.name: [drawn(d, uniform(0, n)) for n in range(400)] for d in SPACE}
    assert all(0.001 <= float(value) <= 1 for value in draws["lr"])
    assert 150 < sum(float(value) < 0.0316 for value in draws["lr"]) < 250  # half of them, by the logarithm
    assert set(draws["depth"]) == set(range(1, 10))
    assert set(draws["drop"]) == {0.0, 0.125, 0.25, 0.375, 0.5}
    assert set(draws["kind"]) == {"a", "b", "c"}


def test_draws_depend_on_their_coordinates_alone() -> None:
    turns = first_turns(SPACE, 4, 3)
    assert first_turns(SPACE, 6, 3)[:4] == turns
    assert first_turns(SPACE, 4, 4) != turns
    values = [0.4, 0.3, None, 0.1]
    after = next_turns(turns, values, "minimize", SPACE, RULES, 1)
    assert next_turns(turns, values, "minimize", SPACE, RULES, 1) == after
    assert next_turns(turns, values, "minimize", SPACE, RULES, 2) != after
    assert [str(turn.values["lr"]) for turn in turns] == ["0.142319", "0.0138416", "0.00418584", "0.0062108"]


@pytest.mark.parametrize(
    ("dimension", "value", "up", "expected"),
    [
        (LR, 0.1, True, 0.12),
        (LR, 0.9, True, 1.0),  # the end of the range
        (LR, 0.1, False, 0.08),
        (DEPTH, 5, True, 6),
        (DEPTH, 2, True, 3),  # 2.4 is rounded to 2, which would be no change
        (DEPTH, 1, False, 1),
        (DROP, 0.25, False, 0.125),
        (DROP, 0.5, True, 0.5),
        (KIND, "b", False, "a"),
        (KIND, "c", True, "c"),
    ],
)
def test_a_perturbed_value_is_in_its_space(dimension: Dimension, value: object, up: bool, expected: object) -> None:
    factor = RULES.factors[up]
    assert perturbed(dimension, value, factor, up=up) == expected  # type: ignore[arg-type]


def test_settings_are_perturbed_or_drawn_anew() -> None:
    values: dict[str, Choice] = {"lr": 0.1, "depth": 5, "drop": 0.25, "kind": "b"}
    found = [explored(values, SPACE, RULES, generation, 0) for generation in range(1, 401)]
    assert 75 < sum(each["lr"] not in (0.08, 0.12) for each in found) < 125  # a quarter
    never, always = replace(RULES, resample=0.0), replace(RULES, resample=1.0)
    ways = Counter(str(explored(values, SPACE, never, generation, 0)["lr"]) for generation in range(1, 401))
    assert set(ways) == {"0.08", "0.12"}
    assert 150 < ways["0.08"] < 250
    assert float(explored(values, SPACE, always, 1, 0)["lr"]) not in (0.08, 0.12)
    zero = Dimension("decay", "linear", 0.0, 1.0)
    assert explored({"decay": 0.0}, [zero], never, 1, 0)["decay"] != 0.0  # no factor would move it


def test_the_worst_copy_the_best() -> None:
    turns = first_turns([LR], 10, 0)
    values: list[float | None] = [float(n) for n in range(10)]
    after = next_turns(turns, values, "minimize", [LR], RULES, 1)
    assert {turn.member for turn in after if turn.is_copy} == {8, 9}
    assert {turn.parent for turn in after if turn.is_copy} <= {0, 1}
    assert [turn.values for turn in after[:8]] == [turn.values for turn in turns[:8]]
    most = next_turns(turns, values, "maximize", [LR], RULES, 1)
    assert {turn.member for turn in most if turn.is_copy} == {0, 1}
    assert {turn.parent for turn in most if turn.is_copy} <= {8, 9}


def test_members_that_failed_copy_others() -> None:
    turns = first_turns([LR], 5, 0)
    after = next_turns(turns, [None, 0.3, None, 0.2, 0.4], "minimize", [LR], RULES, 1)
    assert [(turn.member, turn.parent) for turn in after if turn.is_copy] == [(0, 3), (2, 3)]
    assert next_turns(turns, [None] * 5, "minimize", [LR], RULES, 1) == turns
    alone = next_turns(turns[:2], [0.1, None], "minimize", [LR], RULES, 1)
    assert [turn.parent for turn in alone] == [0, 0]
    assert [Rules(quantile=q, factors=(0.8, 1.2), resample=0, seed=0).copies(5) for q in (0.1, 0.4, 0.5)] == [1, 2, 2]


def study() -> tuple[list[Generation], PopulationRecord]:
    """Return three generations of two members: member 1 copies member 0, then member 0 copies member 1."""

    def result(value: float | None, begin: int, promise: str = "exact") -> SegmentResult:
        return SegmentResult(
            value=value, reason="" if value else "lost", begin=begin, end=begin + 5, total=15, promise=promise
        )

    rows: list[tuple[list[tuple[int, int, float]], list[float | None]]] = [
        ([(0, 0, 0.1), (1, 1, 0.9)], [0.5, None]),
        ([(0, 0, 0.1), (1, 0, 0.12)], [0.4, 0.3]),
        ([(0, 1, 0.144), (1, 1, 0.12)], [0.1, 0.2]),
    ]
    generations = [
        Generation(
            5 * number,
            [Turn(member, parent, {"lr": lr}) for member, parent, lr in turns],
            [result(value, 5 * number) for value in values],
        )
        for number, (turns, values) in enumerate(rows)
    ]
    record = PopulationRecord(
        script="train.py",
        sets=(),
        settings_file="",
        own=(),
        search=("lr=log(0.001,1)",),
        objectives=(("loss", "minimize"),),
        seed=0,
        population=2,
        interval=5,
        quantile=0.2,
        factors=(0.8, 1.2),
        resample=0.25,
    )
    return generations, record


def test_the_schedule_of_the_best_follows_its_copies() -> None:
    generations, record = study()
    expected = [Period(0, 0, {"lr": 0.1}), Period(5, 1, {"lr": 0.12}), Period(10, 0, {"lr": 0.144})]
    assert schedule_of(generations, 0) == expected
    assert schedule_of(generations, 1) == expected[:2]
    result = result_of(generations, record)
    assert (result["best"], result["promise"], result["steps"]) == ([0], "exact", 30)
    assert [each["step"] for each in result["schedule"]] == [0, 5, 10]
    lines = list(lines_of(generations, record, result))
    assert lines[:3] == [
        "member  loss  steps  settings",
        "0       0.1   15     lr=0.144",
        "1       0.2   15     lr=0.12",
    ]
    assert "2 members, 3 generations: 2 copies." in lines[-2]
    assert list(copy_lines(generations[1], generations[2].turns)) == [
        "step 10: member 0 copies member 1: lr 0.12 -> 0.144"
    ]


def test_settings_without_effect_are_seen_by_equal_weights() -> None:
    (_, generation, _), _ = study()
    assert equals_of(generation) == []  # it is not known what they continued
    ended = [replace(each, began_with="one checkpoint", weights_sha256="same") for each in generation.results]
    assert [pair[0] for pair in equals_of(generation._replace(results=ended))] == [True]
    ended[1] = replace(ended[1], weights_sha256="other")
    assert [pair[0] for pair in equals_of(generation._replace(results=ended))] == [False]
    ended[1] = replace(ended[1], began_with="another checkpoint")
    assert equals_of(generation._replace(results=ended)) == []


def test_the_promise_is_that_of_all_members() -> None:
    generations, record = study()
    weak = replace(generations[1].results[0], promise="exact in practice")
    generations[1] = generations[1]._replace(results=[weak, generations[1].results[1]])
    result = result_of(generations, record)
    assert (result["promise"], result["reason"]) == ("tolerance", "members promise exact, exact in practice")
    assert result_of(study()[0], replace(record, objectives=(("seconds", "minimize"),)))["promise"] == "tolerance"


def test_wrong_flags_are_named() -> None:
    flags = PopulationFlags(population=1, interval=0, quantile=0.6, factors="1.2,1.5", resample=2.0)
    typed = dict.fromkeys(("--trials", "--round-size", "--sampler", "--pruner", "--storage", "--no-move"))
    found = flags.problems({**typed, "--sampler": "tpe", "--no-move": True}, LINE)
    assert [problem.error for problem in found] == [
        "--sampler does not go with --population.",
        "--no-move does not go with --population.",
        "--population 1 is out of range.",
        "--interval 0 is out of range.",
        "--quantile 0.6 is out of range.",
        "--resample 2 is out of range.",
        "Invalid value for --factors: 1.2,1.5",
    ]
    assert PopulationFlags(population=2, interval=1, quantile=0.5, factors="1.5,0.5").problems(typed, LINE) == []
    assert [problem.error for problem in PopulationFlags(interval=5).problems_without_population(LINE)] == [
        "--interval needs --population."
    ]
    assert factors_of("1.2,0.8") == (0.8, 1.2)
    assert factors_of("0.8") is factors_of("0.8,inf") is factors_of("a,b") is None


def test_settings_that_cannot_change_are_named() -> None:
    dimensions = [
        dimension_of(text, LINE) for text in ("lr=log(0.001,1)", "batch=[8,16]", "clip=[0.5,1]", "note=[1,2]")
    ]
    found = problems_of_space([d for d in dimensions if isinstance(d, Dimension)], ["lr", "batch", "clip"], LINE)
    assert [problem.error for problem in found] == [
        "batch cannot change while a run trains.",
        "No result depends on note.",
    ]


def test_another_study_is_named(tmp_path: Path) -> None:
    _, record = study()
    before = json.loads(json.dumps(vars(record)))
    assert record.problems_against(before, tmp_path, LINE) == []
    (problem,) = record.problems_against({**before, "population": 3}, tmp_path, LINE)
    assert problem[:2] == (f"The study in {tmp_path} has another population.", "It was 3, and is 2.")
    (problem,) = record.problems_against({"trials": 20}, tmp_path, LINE)
    assert problem.error == f"The study in {tmp_path} has no population."


def test_a_checkpoint_is_copied_as_a_whole(tmp_path: Path) -> None:
    source = tmp_path / "parent" / "checkpoints" / "step-00000005"
    source.mkdir(parents=True)
    (source / MANIFEST).write_text("{}")
    (source / "state.json").write_text("state")
    target = tmp_path / "child"
    draft = target / "checkpoints" / ".step-00000005.unfinished"
    draft.mkdir(parents=True)
    (draft / "torn").write_text("left by a kill")
    sha256 = copy_checkpoint(tmp_path / "parent", target)
    copy = target / "checkpoints" / "step-00000005"
    assert {path.name: path.read_text() for path in copy.iterdir()} == {MANIFEST: "{}", "state.json": "state"}
    later = target / "checkpoints" / "step-00000007"
    later.mkdir()
    assert copy_checkpoint(tmp_path / "parent", target) == sha256  # the member has trained on: nothing is copied
    with pytest.raises(StudyError, match="has no checkpoint"):
        copy_checkpoint(tmp_path, target)


@pytest.mark.parametrize(("kind", "refused"), [("CheckpointError", True), ("NotFiniteError", False)])
def test_a_member_that_diverges_at_once_is_not_refused(tmp_path: Path, kind: str, refused: bool) -> None:
    source = tmp_path / "parent" / "checkpoints" / "step-00000005"
    source.mkdir(parents=True)
    (source / MANIFEST).write_text("{}")
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    ended.wait()
    process = TrialProcess(Path("train.py"), RunRequest(), tmp_path / "child", 10, _process=ended)
    segment = MemberSegment(Turn(0, 1, {"lr": 0.1}), process, 5, 1)
    segment.prepare(tmp_path / "parent")
    process.output.write_text("step 5\n" + json.dumps({"error": {"type": kind, "message": "It failed.\nMore."}}) + "\n")
    assert segment.is_refused == refused
    result = segment.ended("loss")
    assert (result.value, result.reason, result.begin, result.end) == (None, "It failed.", 5, 5)
    assert segment.result() == result
