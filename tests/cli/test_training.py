"""Runs from start to end: the real command and real processes that are killed."""

from __future__ import annotations

import json
import random
import signal
import time
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from tests.cli.command import Command

SCRIPT = """
from dataclasses import dataclass, field
import torch

@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    steps: int | None = 24
    batch: int = 16
    checkpoint: unisono.CheckpointSettings = unisono.CheckpointSettings(every=4)
    pause: float = field(default=0.0, metadata={"changes_bits": False})  # seconds per micro-batch
    lr: float = 0.05

def main(run):
    x = torch.randn(101, 8, generator=torch.Generator().manual_seed(1))
    layers = lambda: [torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)]
    model = run.place(lambda: torch.nn.Sequential(*layers()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.settings.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, run.settings.lr, total_steps=24)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    for step in run.steps(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))):
        for inputs, targets in step:
            time.sleep(run.settings.pause)
            step.backward(((model(inputs) - targets) ** 2).sum(), weight=len(inputs))
        step.update(optimizer, schedule)
        if step.number in (0, 5):
            say(f"step {step.number} of")

unisono.main(main, Settings)
"""


def result(command: Command, run_dir: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((command.folder / run_dir / "result.json").read_text())
    return found


def uninterrupted(command: Command) -> dict[str, Any]:
    """Return the result of a run that is not interrupted."""
    command.train("whole")
    return result(command, "whole")


def kill_process_tree(launcher: Any) -> None:
    """Send SIGKILL to the launcher and all of its descendants at once."""
    tree = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
    for process in tree:
        process.suspend()  # so that no process can clean up after another
    for process in tree:
        process.kill()
    launcher.communicate()


def kill_and_resume(command: Command, rng: random.Random, whole: dict[str, Any], name: str, most: int = 4) -> None:
    """Start on some number of processes, kill all at a random time, resume on another number, and compare the bits."""
    first, second = rng.sample(range(1, most + 1), 2)
    line = ["run", "script.py", "--run-dir", name, "--autoresume", "--ranks"]
    with command.listening():
        running = command.start(*line, str(first), "--set", "pause=0.004")
        command.wait_for(*[f"step 0 of {rank}" for rank in range(first)])
    time.sleep(rng.uniform(0.0, 0.7))
    if running.poll() is None:
        kill_process_tree(running)
    ended = command.run(*line, str(second))
    assert ended.status == 0, ended.err
    after = result(command, name)
    assert after["weights_sha256"] == whole["weights_sha256"], f"{first} -> {second} processes"
    assert after["steps"] == 24


def test_a_killed_and_resumed_run_has_the_same_bits(command: Command) -> None:
    command.script(SCRIPT)
    whole = uninterrupted(command)
    rng = random.Random(time.time_ns())
    kill_and_resume(command, rng, whole, "killed", most=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_killed_and_resumed_runs_have_the_same_bits(command: Command) -> None:
    command.script(SCRIPT)
    whole = uninterrupted(command)
    rng = random.Random(time.time_ns())
    for number in range(20):
        kill_and_resume(command, rng, whole, f"killed-{number}")


@pytest.mark.ci
@pytest.mark.parametrize("signal_number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_saves_ends_cleanly_and_shows_the_command_to_resume(
    command: Command, signal_number: signal.Signals
) -> None:
    command.script(SCRIPT)
    whole = uninterrupted(command)
    with command.listening():
        running = command.start("run", "script.py", "--ranks", "2", "--run-dir", "out", "--set", "pause=0.01")
        command.wait_for("step 5 of 0")
    running.send_signal(signal_number)
    ended = command.end(running)
    assert ended.status == 0, ended.err
    stopped = result(command, "out")
    assert stopped["stopped"]
    assert 6 <= stopped["steps"] < 24
    last = ended.out.strip().splitlines()[-1]
    assert last.startswith("This run was stopped before its end. Next: unisono run script.py")
    for words in ("--ranks 2", "--set pause=0.01", "--run-dir out", "--resume"):
        assert words in last
    ended = command.run("run", "script.py", "--run-dir", "out", "--resume", "--set", "pause=0")
    assert ended.status == 0, ended.err
    after = result(command, "out")
    assert after["weights_sha256"] == whole["weights_sha256"]
    assert not after["stopped"]
    assert after["promise"] == "exact"  # the script declares that a pause does not affect the result


@pytest.mark.slow
def test_a_resume_with_changed_settings_names_each_of_them(command: Command) -> None:
    command.script(SCRIPT)
    command.train("out", "--set=steps=8")
    sets = ["--set", "batch=24", "--set", "seed=7", "--set", "virtual_ranks=4", "--set", "lr=0.1", "--set", "threads=2"]
    ended = command.run("run", "script.py", "--run-dir", "out", "--resume", "--set", "steps=12", *sets)
    assert ended.status == 2
    for line in ("batch = 24", "batch = 16", "seed = 7", "seed = 0", "virtual_ranks = 4", "threads = 2", "lr = 0.1"):
        assert line in ended.err
    assert "--accept-change batch" in ended.err
    assert len(list((command.folder / "out" / "checkpoints").glob("step-*"))) == 2  # the checkpoints are untouched
    ended = command.run(
        "run",
        "script.py",
        "--run-dir",
        "out",
        "--resume",
        "--set",
        "steps=12",
        "--set",
        "seed=7",
        "--accept-change",
        "seed",
    )
    assert ended.status == 0, ended.err
    after = result(command, "out")
    assert after["promise"] == "exact until step 8"
    assert "seed from 0 to 7" in after["reason"]


@pytest.mark.ci
def test_a_damaged_checkpoint_is_named_and_skipped(command: Command) -> None:
    command.script(SCRIPT)
    whole = uninterrupted(command)
    newest = max((command.folder / "whole" / "checkpoints").glob("step-*"))
    (tensors,) = newest.glob("*.safetensors")
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    ended = command.run("run", "script.py", "--run-dir", "whole", "--resume")
    assert ended.status == 0, ended.err
    assert "damaged and skipped" in ended.out
    assert tensors.name in ended.out
    assert result(command, "whole")["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.slow
def test_plain_python_and_torchrun_give_the_same_bits(command: Command) -> None:
    import subprocess
    import sys

    from tests.cli.command import ROOT
    from unisono import environment

    command.script(SCRIPT)
    command.train("whole", "--set=steps=6")
    for name, words in {
        "python": [sys.executable, "script.py"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"],
    }.items():
        done = subprocess.run(
            [*words, "--set", "steps=6", "--run-dir", name],
            cwd=command.folder,
            env=environment.inherited({"PYTHONPATH": str(ROOT)}),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert result(command, name)["weights_sha256"] == result(command, "whole")["weights_sha256"]
    again = json.loads((command.folder / "torchrun" / "environment.json").read_text())["command"]
    assert (
        again == "unisono run script.py --set steps=6 --run-dir torchrun --ranks 2"
    )  # the command that messages propose


@pytest.mark.ci
def test_plain_python_reports_all_wrong_settings_with_status_2(command: Command) -> None:
    import subprocess
    import sys

    from tests.cli.command import ROOT
    from unisono import environment

    command.script(SCRIPT)
    command.open_pipe()
    done = subprocess.run(
        [sys.executable, "script.py", "--set", "batchh=3", "--set", "seed=x"],
        cwd=command.folder,
        env=environment.inherited({"PYTHONPATH": str(ROOT)}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "batchh" in done.stderr
    assert "batch" in done.stderr
    assert "seed" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_fifty_runs_in_a_row_end_without_output_on_stderr(command: Command) -> None:
    command.script(SCRIPT)
    for number in range(50):
        ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", f"run-{number}", "--set", "steps=3")
        assert ended.status == 0, ended.err
        assert ended.err == ""


@pytest.mark.ci
def test_a_run_resumes_after_a_failed_save(command: Command) -> None:
    """A file replaces the folder for checkpoints: no process can write there, not even as root."""
    command.script(
        SCRIPT.replace(
            "        if step.number in (0, 5):",
            "        if step.number == 5 and run.is_main:\n"
            "            for thread in threading.enumerate():\n"  # the checkpoint after step 4 is still being written
            "                if thread.name.startswith('checkpoint'): thread.join()\n"
            "            (run.dir / 'checkpoints').rename(run.dir / 'kept')\n"
            "            (run.dir / 'checkpoints').write_text('a file')\n"
            "        if step.number in (0, 5):",
        )
    )
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "out")
    assert ended.status == 1
    assert "Cannot write the checkpoint after step 8" in ended.err
    assert ended.err.rstrip().splitlines()[-1].lstrip().startswith("Next:")
    folder = command.folder / "out"
    (folder / "checkpoints").unlink()
    (folder / "kept").rename(folder / "checkpoints")
    whole = uninterrupted_from(command, SCRIPT)
    command.train("out", "--resume")
    assert result(command, "out")["weights_sha256"] == whole["weights_sha256"]


def uninterrupted_from(command: Command, script: str) -> dict[str, Any]:
    command.script(script)
    return uninterrupted(command)


@pytest.mark.ci
def test_a_finished_run_keeps_its_result(command: Command) -> None:
    command.script(SCRIPT)
    before = uninterrupted(command)
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "whole", "--resume")
    assert ended.status == 0, ended.err
    assert "This run already finished after 24 steps." in ended.out
    found = result(command, "whole")
    assert found.pop("audit")["lines"] > 0  # the launcher has recorded the start and the end
    assert found == before


def test_a_break_keeps_the_steps_done(command: Command) -> None:
    left = SCRIPT.replace(
        "        if step.number in (0, 5):", "        if step.number == 5:\n            break\n        if 0:"
    )
    command.script(left)
    command.train("out", ranks=2)
    assert result(command, "out")["steps"] == 6
    whole = uninterrupted_from(command, SCRIPT)
    command.train("out", "--resume")
    assert result(command, "out")["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.slow
def test_a_closed_standard_output_does_not_end_training(command: Command) -> None:
    """Cover `python script.py | head -n 1`."""
    script = command.script(SCRIPT.replace("step.update(", "print('a line of its own', flush=True); step.update("))
    training = command.start_python(str(script), "--run-dir", "piped")
    assert training.stdout is not None
    training.stdout.readline()
    training.stdout.close()
    assert training.wait(30) == 0
    assert result(command, "piped")["steps"] == 24


def test_a_stop_after_the_loop_names_the_last_checkpoint(command: Command) -> None:
    command.script(SCRIPT + "\nsay('after')\nsignal.pause()\n")
    running = command.start("run", "script.py", "--run-dir", "out")
    command.wait_for("after 0")
    running.send_signal(signal.SIGINT)
    ended = command.end(running)
    assert ended.status == 0
    message = (
        "Stopped outside the loop; step-00000024 is saved.\n  Next: unisono run script.py --run-dir out --resume\n"
    )
    assert ended.err.endswith(message)


@pytest.mark.slow
def test_plain_python_confirms_ctrl_c(command: Command) -> None:
    command.script(SCRIPT)
    running = command.start_python("script.py", "--run-dir", "out", "--set", "pause=0.02")
    command.wait_for("step 0 of 0")
    running.send_signal(signal.SIGINT)
    ended = command.end(running)
    assert (ended.status, result(command, "out")["stopped"]) == (0, True)
    assert ended.err == "Stopping: the current step is finished and saved. A second Ctrl-C kills this process.\n"
    assert ended.out.endswith("Next: python script.py --set pause=0.02 --run-dir out --resume\n")


COMMANDS = {"python": ["script.py"], "unisono": ["-P", "-m", "unisono.cli.main", "run", "script.py"]}
CLOSED = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["python", "unisono"])
def test_json_for_a_closed_standard_output_is_no_failure(command: Command, starter: str) -> None:
    """Cover `unisono run script.py --json | head -n 1`."""
    command.script(SCRIPT)
    training = command.start_python(*COMMANDS[starter], "--run-dir", "piped", "--json")
    assert training.stdout is not None
    training.stdout.readline()
    training.stdout.close()
    training.stdout = None
    ended = command.end(training)
    assert (ended.status, ended.err) == (0, "")
    assert result(command, "piped")["steps"] == 24


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["python", "unisono"])
def test_a_closed_descriptor_1_is_not_reused_for_output(command: Command, starter: str) -> None:
    """Cover `unisono run script.py >&-`."""
    command.script(SCRIPT)
    ended = command.end(command.start_python("-c", CLOSED, *COMMANDS[starter], "--run-dir", "quiet"))
    assert (ended.status, ended.out, ended.err) == (0, "", "")
    assert result(command, "quiet")["steps"] == 24
    assert len((command.folder / "quiet" / ".lock").read_text().splitlines()) == 1


@pytest.mark.slow
def test_a_small_batch_reduces_the_virtual_ranks_and_reports_it(command: Command) -> None:
    command.script(SCRIPT)
    ended = command.run("run", "script.py", "--set", "batch=4", "--set", "steps=2", "--run-dir", "small")
    explicit = command.run("run", "script.py", "--set", "virtual_ranks=4", "--set", "steps=2", "--run-dir", "explicit")
    assert "\n4 virtual ranks (no more than the batch of 4): 1 to 4 processes, micro-batches of 1\n" in ended.out
    assert "\n4 virtual ranks: 1 to 4 processes, micro-batches of 4\n" in explicit.out
    assert "each virtual rank has 1 sample of the batch of 4" in ended.out
    assert "a virtual rank gets" not in explicit.out


@pytest.mark.ci
def test_a_signal_after_the_script_has_returned_changes_nothing(command: Command) -> None:
    """The last checkpoint is saved already; the run only has to write its result."""
    command.script("""
        import torch

        class Net(torch.nn.Linear):
            def state_dict(self, *args, **kwargs):
                if over:
                    os.kill(os.getpid(), signal.SIGTERM)
                return super().state_dict(*args, **kwargs)

        over = False

        def main(run):
            global over
            model = run.place(lambda: Net(2, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run.track(model=model, optimizer=optimizer)
            for step in run.steps(torch.utils.data.TensorDataset(torch.ones(8, 2))):
                for (x,) in step:
                    step.backward(model(x).sum(), weight=len(x))
                step.update(optimizer)
            over = True

        unisono.main(main)
        """)
    ended = command.run("run", "script.py", "--run-dir", "out", "--set", "steps=2", "--set", "batch=8")
    assert ended.status == 0, ended.err
    assert result(command, "out")["stopped"] is False
