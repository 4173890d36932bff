"""The names in result.json: what a loop logs never takes the place of an entry that readers use."""

from __future__ import annotations

import json
import re
from pathlib import Path

from unisono.report.closing_lines import closing_lines
from unisono.report.result_file import RESULT, read_result
from unisono.train.state.run_result import RESERVED, with_logged

ROOT = Path(__file__).parents[2]


def test_reserved_names_are_those_of_the_documentation() -> None:
    text = (ROOT / "docs/reference/run-directory.md").read_text().partition("## result.json")[2]
    first = re.findall(r"^\| ([^|]*`[^|]*) \|", text, re.M)
    documented = {name for cell in first for name in re.findall(r"`(\w+)`", cell)}
    assert documented == RESERVED
    assert RESULT.keys() <= RESERVED


def test_names_of_entries_get_a_prefix_also_if_this_run_lacks_the_entry(tmp_path: Path) -> None:
    known = {"steps": 5, "loss": 0.5}
    logged = {"loss": 0.5, "steps": 6, "late_mean": "x", "servers": "x", "bleu": 1.0, "nothing": None}
    found = with_logged(known, logged)
    assert found == {
        "steps": 5,
        "loss": 0.5,
        "logged_steps": 6,
        "logged_late_mean": "x",
        "logged_servers": "x",
        "bleu": 1.0,
        "nothing": None,
    }
    (tmp_path / "result.json").write_text(json.dumps(found))
    assert read_result(tmp_path) == found
    assert any("5 steps, loss 0.5" in line for line in closing_lines(found, tmp_path))
