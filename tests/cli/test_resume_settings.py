"""A resume with changed settings: the names that --accept-change takes, and the promise afterwards."""

from __future__ import annotations

import pytest

from tests.cli.command import Command
from tests.cli.test_training import SCRIPT, result


@pytest.mark.slow
def test_accept_change_takes_known_fields_and_only_real_changes_end_the_promise(command: Command) -> None:
    command.script(SCRIPT)
    command.train("out", "--set=steps=4")
    again = ["script.py", "--run-dir", "out", "--resume"]

    refused = command.run("run", *again, "--accept-change", "lenght", "--accept-change", "torch")
    assert refused.status == 2
    assert refused.err == (
        "Results depend on no field lenght.\n  The nearest name is length.\n"
        "  Next: unisono run script.py --run-dir out --resume --accept-change length --accept-change torch\n"
    )
    refused = command.end(command.start_python(*again, "--accept-change", "zzz", "--set", "seed=1"))
    assert refused.status == 2
    fields = refused.err.partition("Results depend on batch")[2]
    assert {"clip", "exchange", "instruction_set", "length", "local_sgd.sync_every", "lr"} <= set(fields.split(", "))
    assert "(without it)" in refused.err
    assert "Cannot resume with seed = 1." in refused.err  # both problems are reported together

    # epochs=1 replaces the steps of the earlier run: 101 samples in batches of 16 are 7 steps.
    ended = command.run("run", *again, "--accept-change", "length", "--accept-change", "lr", "--set", "epochs=1")
    assert ended.status == 0, ended.err
    after = result(command, "out")
    assert (after["steps"], after["promise"]) == (7, "exact")
    ended = command.run("run", *again)
    assert "To continue: unisono run script.py --run-dir out --resume --set steps=14" in ended.out


@pytest.mark.slow
def test_a_resume_with_other_kernels_is_refused(command: Command) -> None:
    """A setting of `speed`, and a switch of torch in the script."""
    command.script(SCRIPT)
    command.train("out", "--set=steps=4", "--set=speed.optimizer=fused")
    again = ["run", "script.py", "--run-dir", "out", "--resume", "--set", "steps=8"]
    refused = command.run(*again, "--set", "speed.optimizer=script")
    assert refused.status == 2
    assert (
        "Cannot resume with speed.optimizer = script.\n  The run was begun with speed.optimizer = fused" in refused.err
    )
    flash = "torch.backends.cuda.enable_flash_sdp(False)"
    command.script(SCRIPT.replace("def main(run):\n", f"def main(run):\n    {flash}\n"))
    refused = command.run(*again)
    assert refused.status == 2
    assert "Cannot resume with other kernels or formats of numbers." in refused.err
    assert "now there are float32 products highest, no flash attention" in refused.err

    command.script(SCRIPT)
    accepted = ["--set", "speed.optimizer=script", "--accept-change", "speed.optimizer"]
    ended = command.run(*again, *accepted, "--set", "speed.attention=math", "--accept-change", "speed.attention")
    assert ended.status == 0, ended.err
    after = result(command, "out")
    assert (after["steps"], after["promise"]) == (8, "exact until step 4")
    assert "speed.optimizer from fused to script" in after["reason"]


@pytest.mark.ci
def test_a_resume_of_another_script_names_it(command: Command) -> None:
    command.script(SCRIPT)
    command.train("out", "--set=steps=4")
    command.script(SCRIPT, name="other.py")
    again = ["run", "other.py", "--run-dir", "out", "--resume"]
    refused = command.run(*again, "--set", "clip=2")
    assert refused.status == 2
    resume = "unisono run script.py --run-dir out --resume"
    begin = "unisono run other.py --set clip=2 --run-dir out-2"
    assert refused.err == (
        "out is a run of script.py, and not of other.py.\n  Their settings differ: clip.\n"
        f"  Next: {resume}, or: {begin}\n"
    )
    (command.folder / "out-2").mkdir()
    refused = command.run(*again, "--set", "clip=2")
    assert f"{begin[:-2]}-3\n" in refused.err
    (command.folder / "script.py").unlink()
    refused = command.run(*again, "--set", "clip=2")
    assert refused.err.startswith("Cannot resume with clip = 2.0.\n")  # the script was renamed
    renamed = command.run(*again, "--set", "steps=8")
    assert renamed.status == 0, renamed.err


WITH_ARGUMENTS = SCRIPT.replace(
    "def main(run):\n",
    """def main(run):
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=40)
    length = parser.parse_args().length
""",
).replace("OneCycleLR(optimizer, run.settings.lr, total_steps=24)", "CosineAnnealingLR(optimizer, length)")


@pytest.mark.ci
def test_a_resume_keeps_the_arguments_of_the_script(command: Command) -> None:
    command.script(WITH_ARGUMENTS)
    run = ["run", "script.py", "--run-dir", "out"]
    whole = command.run("run", "script.py", "--run-dir", "whole", "--", "--length", "100")
    command.run(*run, "--set", "steps=8", "--ranks", "2", "--", "--length", "100")
    again = command.run(*run, "--set", "steps=24", "--ranks", "3", "--resume")
    assert (whole.status, again.status) == (0, 0), again.err
    assert "continuing after step 8\narguments of the script: --length 100\n" in again.out
    assert result(command, "out")["weights_sha256"] == result(command, "whole")["weights_sha256"]
    refused = command.run(*run, "--set", "steps=32", "--resume", "--", "--lenght=50")
    assert refused.status == 2, "argparse knows no --lenght"
    changed = command.run(*run, "--set", "steps=32", "--resume", "--", "--length=50")
    assert "schedule.T_max changes from 100 to 50: other results from step 24 on\n" in changed.out
    assert result(command, "out")["promise"] == "exact until step 24"
    kept = command.run(*run, "--set", "steps=40", "--resume")
    assert "arguments of the script: --length=50\n" in kept.out, "those of the newest checkpoint"


@pytest.mark.ci
def test_other_arguments_of_the_script_end_the_promise(command: Command) -> None:
    """An argument may change the loss or the data, which nothing else in a checkpoint shows."""
    scale = "parser.add_argument('--scale', type=float, default=1.0)\n    run.print(parser.parse_args().scale)"
    command.script(WITH_ARGUMENTS.replace("length = parser.parse_args().length", f"length = 40\n    {scale}"))
    run = ["run", "script.py", "--run-dir", "out"]
    command.run(*run, "--set", "steps=8", "--", "--scale", "3")
    same = command.run(*run, "--set", "steps=12", "--resume", "--", "--scale", "3")
    assert "script arguments" not in same.out
    assert result(command, "out")["promise"] == "exact"
    none = command.run(*run, "--set", "steps=16", "--resume", "--")
    line = "script arguments change from --scale 3 to none: results may differ from step 12 on\n"
    assert line in none.out, none.out + none.err
    assert result(command, "out")["promise"] == "exact until step 12"
    assert "script arguments from --scale 3 to none" in result(command, "out")["reason"]
