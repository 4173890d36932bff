"""Counting the floating-point operations of a run's model."""

from __future__ import annotations

import pytest

from tests.cli.command import Command
from tests.cli.test_training import SCRIPT, result
from unisono.cli.compare.flops_of_run import count_flops_of_run
from unisono.config import CommandLine
from unisono.errors import SettingsError
from unisono.report.report_data import report_data
from unisono.report.run_files import RunFiles

LINE = CommandLine(("unisono", "report", "out"))


@pytest.mark.slow
def test_operations_are_those_of_the_layers(command: Command) -> None:
    command.script(SCRIPT)
    ended = command.run("run", "script.py", "--run-dir", "out", "--ranks", "2")
    assert ended.status == 0, ended
    before = result(command, "out")
    counts = count_flops_of_run(command.folder / "out", LINE)
    forward = 2 * (8 * 16 + 16 * 1)
    assert counts["flops_per_sample"] == forward + 2 * forward - 2 * 8 * 16  # the input needs no gradient
    assert counts["parameters"] == 8 * 16 + 16 + 16 + 1
    assert counts["dtype"] == "float32"
    assert counts["peak"] > 1e8
    assert result(command, "out") == before
    files = RunFiles(command.folder / "out")
    files.read()
    rate = report_data(files)["rate"]
    assert rate["flops"][-1] == pytest.approx(rate["samples"][-1] * counts["flops_per_sample"], rel=1e-3)
    assert rate["utilization"][-1] == pytest.approx(rate["flops"][-1] / counts["peak"] / 2, rel=1e-3)


def test_a_script_that_is_gone(command: Command) -> None:
    script = command.script(SCRIPT)
    command.train("out")
    script.unlink()
    with pytest.raises(SettingsError, match="Cannot find the script"):
        count_flops_of_run(command.folder / "out", LINE)
    assert not (command.folder / "out" / "flops.json").exists()
