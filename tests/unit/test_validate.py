"""Checks of whole requests: several sources of settings, several problems, and a corrected command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import unisono
from tests.unit.test_config import Settings, problems_of
from unisono.config import CommandLine, flatten, gather, load, provenance_lines
from unisono.config.validate import check, examine
from unisono.errors import Problem


def test_check_accepts_valid_settings() -> None:
    assert check(load(Settings, sets=["steps=1"]).settings, 8, CommandLine()) == []
    assert check(load(Settings, sets=["epochs=2"]).settings, 1, CommandLine()) == []


@pytest.mark.parametrize(
    ("changes", "true", "do"),
    [
        ({}, "One of them must say when the run ends.", "--set steps=100, or: --set epochs=1"),
        (
            {"steps": 1, "epochs": 1},
            "Only one of them can say when the run ends.",
            "--set epochs=none, or: --set steps=none",
        ),
        ({"steps": 0}, "It must be at least 1.", "--set steps=1"),
        ({"epochs": -1}, "It must be at least 1.", "--set epochs=1"),
        ({"steps": 1, "micro_batch": 0}, "It must be at least 1.", "--set micro_batch=1"),
        ({"steps": 1, "virtual_ranks": 0}, "It must be at least 1.", "--set virtual_ranks=8"),
        ({"steps": 1, "batch": 0}, "It must be at least 1.", "--set batch=64"),
        ({"steps": 1, "threads": 0}, "It must be at least 1.", "--set threads=1"),
        ({"steps": 1, "seed": -1}, "It must be at least 0.", "--set seed=0"),
        ({"steps": 1, "seed": 2**64}, f"It must be at most {2**64 - 1}.", f"--set seed={2**64 - 1}"),
        (
            {"steps": 1, "clip": 0.0},
            "It must be above 0.",
            "--set clip=1.0, or: --set clip=none",
        ),
        (
            {"steps": 1, "clip": float("nan")},
            "It must be above 0.",
            "--set clip=1.0, or: --set clip=none",
        ),
        (
            {"steps": 1, "checkpoint": unisono.CheckpointSettings(keep=0)},
            "It must be at least 1.",
            "--set checkpoint.keep=2",
        ),
        (
            {"steps": 1, "checkpoint": unisono.CheckpointSettings(every=-1)},
            "It must be at least 0.",
            "--set checkpoint.every=0",
        ),
        (
            {"steps": 1, "loader": unisono.LoaderSettings(workers=-1)},
            "It must be at least 0.",
            "--set loader.workers=0",
        ),
        (
            {"steps": 1, "loader": unisono.LoaderSettings(prefetch=0)},
            "It must be at least 1.",
            "--set loader.prefetch=2",
        ),
        (
            {"steps": 1, "virtual_ranks": 65},
            "Each virtual rank needs a sample, so batch = 64 allows at most 64 virtual ranks.",
            "--set virtual_ranks=64, or: --set batch=65",
        ),
        ({"steps": "3"}, "steps takes a whole number or none.", "--set steps=1"),
    ],
)
def test_check_reports_facts_and_a_command(changes: dict[str, Any], true: str, do: str) -> None:
    (problem,) = check(Settings(**changes), 1, CommandLine())
    assert (problem.facts, problem.remedy) == (true, do)


def test_more_processes_than_virtual_ranks_are_refused_with_a_command() -> None:
    assert check(Settings(steps=1), 9, CommandLine(("unisono", "run", "text"))) == [
        Problem(
            "9 processes are more than virtual_ranks.",
            "Each of the 8 virtual ranks runs on one: 1 to 8 processes.",
            "unisono run text --ranks 8, or (other bits): unisono run text --ranks 9 --set virtual_ranks=9",
        )
    ]
    (problem,) = check(Settings(steps=1, batch=8), 9, CommandLine())
    assert problem.remedy.endswith("--set virtual_ranks=9 --set batch=9")


def test_check_reports_several_problems_together() -> None:
    wrong = Settings(batch=3, steps=1, epochs=2, clip=-1.0, micro_batch=0, threads=0)
    assert len(check(wrong, 9, CommandLine())) == 6


@pytest.mark.parametrize(("before", "now"), [("steps=24", "epochs=3"), ("epochs=3", "steps=24")])
def test_the_later_of_steps_and_epochs_takes_precedence(tmp_path: Path, before: str, now: str) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Own(unisono.Settings):
        steps: int | None = 7

    ran = tmp_path / "settings.toml"
    ran.write_text(provenance_lines(*load(Own, sets=[before])))
    newer = tmp_path / "newer.toml"
    newer.write_text(now.replace("=", " = "))
    name = now.partition("=")[0]
    for loaded in (
        load(Own, earlier=ran, sets=[now]),
        load(Own, earlier=ran, file=newer),
        load(Own, file=ran, sets=[now]),
        load(Own, earlier=ran, file=newer, sets=["seed=1"]),
    ):
        values = flatten(loaded.settings)
        assert f"{name}={values[name]}" == now
        assert [values["steps"], values["epochs"]].count(None) == 1
    both = load(Own, sets=[before, now])  # given together, they conflict
    (problem,) = check(both.settings, 1, CommandLine(("python", "train.py", "--set", before, "--set", now)))
    assert problem.facts == "Only one of them can say when the run ends."
    assert problem.remedy.startswith("python train.py --set ")


def test_precedence_is_request_then_earlier_run_then_script(tmp_path: Path) -> None:
    ran, newer = tmp_path / "settings.toml", tmp_path / "newer.toml"
    ran.write_text(
        'batch = 48  # --set\nclip = "none"  # mine.toml\nname = "a b"  # --set\nlr = 0.1  # --set\n'
        "seed = 3  # script\ngone = 1  # --set\n"
    )
    newer.write_text("lr = 0.2\n")
    settings, sources = load(Settings, earlier=ran, file=newer, sets=["model.width=32"])
    assert (settings.batch, settings.clip, settings.name, settings.lr, settings.seed) == (48, None, "a b", 0.2, 0)
    assert (sources["batch"], sources["clip"], sources["lr"]) == ("--set", "mine.toml", str(newer))
    assert load(Settings, earlier=ran, sets=["batch=32"]).settings.batch == 32


def test_none_is_a_string_where_a_literal_contains_it(tmp_path: Path) -> None:
    """A resumed run keeps the value that --set gave."""
    ran = tmp_path / "settings.toml"
    given = ["parallel.activation_checkpoint=none", "compress.kind=none", "micro_batch=none"]
    ran.write_text(provenance_lines(*load(unisono.Settings, sets=given)))
    loaded, sources = load(unisono.Settings, earlier=ran)
    assert (loaded.parallel.activation_checkpoint, loaded.compress.kind, loaded.micro_batch) == ("none", "none", None)
    assert sources["parallel.activation_checkpoint"] == sources["micro_batch"] == "--set"


def test_unreadable_settings_of_an_earlier_run_are_reported_with_other_problems(tmp_path: Path) -> None:
    ran = tmp_path / "settings.toml"
    ran.write_text("a = = 1")
    assert [p.error for p in problems_of(Settings, earlier=ran, sets=["lr=x"])] == [
        "Cannot resume without the run's settings.",
        "Invalid value: lr = x",
    ]
    ran.write_text('batch = "many"  # --set\n')
    (problem,) = problems_of(Settings, earlier=ran)
    assert (problem.facts, problem.remedy) == ("batch takes a whole number.", "--set batch=64")


def test_invalid_values_do_not_hide_other_problems() -> None:
    line = CommandLine(
        ("unisono", "run", "train.py", "--ranks", "9", "--set", "lrr=1", "--set", "clip=x", "--set", "seed=-1")
    )
    gathered = gather(Settings, sets=["lrr=1", "clip=x", "seed=-1", "steps=1"], line=line)
    problems = examine(gathered, 9).problems
    assert [p.error for p in problems] == [
        "There is no setting lrr.",
        "Invalid value: clip = x",
        "seed = -1 is out of range.",
        "9 processes are more than virtual_ranks.",
    ]
    corrected = "--set lr=1 --set clip=1.0 --set seed=0"
    assert [problem.remedy for problem in problems[:3]] == [f"unisono run train.py --ranks 8 {corrected}"] * 3
    assert problems[3].remedy == (
        f"unisono run train.py --ranks 8 {corrected}, or (other bits): "
        f"unisono run train.py --ranks 8 {corrected} --set virtual_ranks=9"
    )
    # consequences of an invalid value are not reported
    assert len(examine(gather(Settings, sets=["steps=1", "batch=x", "virtual_ranks=65"]), 1).problems) == 1


def test_a_proposed_command_changes_only_the_named_arguments() -> None:
    line = CommandLine(("python", "a b.py", "--set", "lr=1", "--resume", "--accept-change", "x", "--", "--set", "lr=3"))
    assert str(line.setting("lr=2")) == "python 'a b.py' --set lr=2 --resume --accept-change x -- --set lr=3"
    assert str(line.setting("seed=2")).endswith("--accept-change x --set seed=2 -- --set lr=3")
    assert str(line.without("--resume").flag("--accept-change", "lr", "x")).startswith(
        "python 'a b.py' --set lr=1 --accept-change lr --"
    )
    assert str(line.in_processes(2)).startswith("unisono run 'a b.py' --set lr=1 --resume --accept-change x --ranks 2")
    assert str(CommandLine(("--set", "a", "--set")).setting("b=1", instead_of="a")) == "--set b=1 --set"
    assert str(CommandLine().in_processes(2)) == "unisono run SCRIPT --ranks 2"


def test_the_file_that_was_probably_meant_is_named(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text("")
    line = CommandLine(("python", "train.py", "--settings", f"{tmp_path}/smal.toml"))
    (problem,) = problems_of(Settings, file=tmp_path / "smal.toml", line=line)
    assert problem.remedy == f"python train.py --settings {tmp_path}/small.toml"
    (tmp_path / "small.toml").unlink()
    (problem,) = problems_of(Settings, file=tmp_path / "smal.toml", line=line)
    assert problem.remedy.startswith("python train.py (without a file)")
