"""Corrections of several problems of a request, in one command."""

from __future__ import annotations

from unisono.config import CommandLine, merge_corrections
from unisono.errors import Problem

LINE = CommandLine(("unisono", "run", "txt", "--ranks", "9", "--set", "lr=abc", "--set", "zzz=1", "--json"))


def remedies(*texts: object, line: CommandLine = LINE) -> list[str]:
    """Return the merged remedies of problems with these remedies."""
    problems = [Problem(f"Problem {number}.", "A fact.", str(text)) for number, text in enumerate(texts)]
    merged = merge_corrections(problems, line)
    assert [problem[:2] for problem in merged] == [problem[:2] for problem in problems]
    return [problem.remedy for problem in merged]


def test_settings_flags_and_targets_are_corrected_together() -> None:
    target = str(LINE).replace("txt", "text")
    found = remedies(LINE.setting("lr=0.1"), LINE.flag("--ranks", "8"), LINE.setting("batch=1"), target)
    assert found == ["unisono run text --ranks 8 --set lr=0.1 --set zzz=1 --json --set batch=1"] * 4


def test_each_alternative_and_its_note_remain() -> None:
    without = f"{LINE.setting(instead_of='zzz=1')} (without it)"
    choice = f"{LINE.flag('--ranks', '8')}, or (other bits): {LINE.setting('virtual_ranks=9')}"
    found = remedies(without, choice, LINE.setting("lr=0.1"))
    corrected = "unisono run txt --ranks 8 --set lr=0.1 --json"
    assert found[0] == f"{corrected} (without it)"
    assert found[1] == f"{corrected}, or (other bits): {corrected} --set virtual_ranks=9"
    assert found[2] == corrected


def test_other_remedies_remain() -> None:
    others = [
        "pip install 'unisono[metrics]'",
        "unisono run --help",
        "Write in a.toml: lr = 'it's'",
        "unisono copy text",
    ]
    assert remedies(LINE.setting("lr=0.1"), *others) == [str(LINE.setting("lr=0.1")), *others]


def test_the_own_correction_of_one_setting_counts() -> None:
    assert remedies(LINE.setting("lr=1"), LINE.setting("lr=2")) == [
        str(LINE.setting("lr=1")),
        str(LINE.setting("lr=2")),
    ]


def test_an_unknown_command_gets_all_changes() -> None:
    line = CommandLine()
    assert remedies(line.setting("lr=0.1"), line.setting("batch=1"), line=line) == ["--set lr=0.1 --set batch=1"] * 2


def test_words_of_the_script_and_secrets_remain() -> None:
    line = CommandLine(("unisono", "run", "a.py", "--set", "api_key=hunter2", "--set", "lr=x", "--", "--set", "lr=x"))
    found = remedies(line.setting("lr=0.1"), line.setting("batch=1"), line=line)
    assert found == ["unisono run a.py --set 'api_key=***' --set lr=0.1 --set batch=1 -- --set lr=x"] * 2
