"""Dry runs: settings that do not fit the model of a script are refused before the run starts."""

from __future__ import annotations

import runpy
import signal
import sys
import tempfile
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.command import Command
from tests.cli.refused_requests import RequestProblems
from unisono import environment
from unisono.environment import World
from unisono.errors import SettingsError
from unisono.launcher import local_launch
from unisono.testing import run_ranks

MODEL = """
from dataclasses import dataclass
from pathlib import Path
import torch, torch.nn as nn, torch.nn.functional as F, unisono

@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    steps: int | None = 2
    batch: int = 8
    heads: int = 3
    depth: int = 2
    norm: str = "layer"
    dtype: str = "float32"
    counts: bool = False

class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, 3, c // self.heads)).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.c_proj(y.transpose(1, 2).flatten(2))

class GPT(nn.Module):
    def __init__(self, s):
        super().__init__()
        width = 12 * s.heads
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, s.heads) for _ in range(s.depth))
        self.last = nn.BatchNorm1d(8) if s.norm == "batch" else nn.LayerNorm(width)
        self.head = nn.Linear(width, 32).to(getattr(torch, s.dtype))
        if s.counts:
            self.counts = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))

def loss(out, rows):
    return F.cross_entropy(out.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"), rows[:, 1:].numel()

def main(run):
    if run.is_main:
        print("the main process was here")
    with run.first():
        data = torch.utils.data.TensorDataset(torch.randint(0, 32, (64, 9)))
    model = run.place(lambda: GPT(run.settings))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=run.total_steps)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    for step in run.steps(data):
        step.run(model, loss, forward=lambda m, b: m(b[0][:, :-1]))
        step.update(optimizer, schedule)

if __name__ == "__main__":
    unisono.main(main, Settings)
"""


@pytest.mark.parametrize(
    ("words", "true", "do"),
    [
        ("--ranks 2 --set parallel.tensor=2", "3 heads", "parallel.tensor=3"),
        ("--ranks 4 --set parallel.tensor=2 --set parallel.pipeline=2 --set precision=bf16", "3 heads", "tensor=3"),
        ("--ranks 6 --set parallel.pipeline=6", "5 have parameters", "parallel.pipeline=5"),
        ("--ranks 2 --set parallel.pipeline=2 --set norm=batch", "BatchNorm1d", "GroupNorm"),
        (
            "--ranks 2 --set compress.kind=int8 --set dtype=float64",
            "Only float32 gradients are compressed",
            "compress.kind=none",
        ),
        ("--ranks 2 --set compress.kind=int8 --set counts=true", "no gradient", "over=[optimizer]"),
        pytest.param("--set compress.kind=topk --set dtype=complex64", "float32", "kind=none", marks=pytest.mark.slow),
    ],
)
def test_an_impossible_division_of_the_model_is_refused_before_the_start(
    request_problems: RequestProblems, tmp_path: Path, words: str, true: str, do: str
) -> None:
    (tmp_path / "gpt.py").write_text(MODEL)
    (problem,) = request_problems("run", "gpt.py", *words.split())
    assert true in problem.facts
    assert do in problem.remedy


@pytest.mark.slow
def test_after_a_dry_run_the_main_process_acts_once(command: Command) -> None:
    (command.folder / "gpt.py").write_text(MODEL)
    words = ["run", "gpt.py", "--ranks", "2", "--set", "parallel.tensor=2", "--set", "heads=2"]
    ended = command.run(*words)
    assert ended.status == 0, ended.err
    assert ended.out.count("the main process was here") == 1
    assert "2 steps" in ended.out
    assert not ended.err


@pytest.mark.slow
def test_other_errors_of_a_dry_run_are_left_to_the_run(command: Command) -> None:
    (command.folder / "gpt.py").write_text(MODEL.replace("model = run.place", "1 / 0\n    model = run.place"))
    ended = command.run("run", "gpt.py", "--ranks", "2", "--set", "parallel.tensor=2", "--run-dir", "out")
    assert ended.status == 1
    assert ended.last == "ZeroDivisionError: division by zero"
    assert "the main process was here" in command.log(0)


@pytest.mark.slow
def test_without_a_dry_run_every_process_refuses_it(command: Command) -> None:
    (command.folder / "gpt.py").write_text(MODEL)
    words = ["run", "gpt.py", "--ranks", "2", "--set", "parallel.tensor=2", "--run-dir", "out"]
    ended = command.run(*words, "--no-dry-run")
    assert ended.status == 1
    assert "3 heads" in ended.err
    assert "the main process was here" in command.log(0)


SLOW = """
def main(run):
    say("here")
    time.sleep(60)

unisono.main(main)
"""


def test_ctrl_c_in_a_dry_run_starts_nothing(command: Command) -> None:
    command.script(SLOW)
    words = ["run", "script.py", "--ranks", "2", "--set", "steps=1", "--set", "parallel.shard=2"]
    running = command.start(*words)
    command.wait_for("here 1")
    running.send_signal(signal.SIGINT)
    ended = command.end(running)
    assert ended.status == 0
    assert "Stopped before the start" in ended.err
    assert not (command.folder / "runs").exists()
    assert not list(command.temporary.iterdir())


def test_a_dry_run_has_a_time_limit(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent("import time\ntime.sleep(60)"))
    outcome = local_launch.dry_run(script, ["--run-dir=out"], ranks=2, seconds=1)
    assert outcome.failure is not None
    assert outcome.failure.signal == signal.SIGALRM


def _dry_run(_: World, folder: str, words: list[str], size: int) -> str:
    """Execute a dry run of the script in a folder and return its error, or an empty string."""
    sys.argv = [f"{folder}/gpt.py", "--run-dir=out", *words]
    with tempfile.TemporaryDirectory() as record_folder:
        environment.assign(
            World(rank=size - 1, size=size, local_size=size, launcher="unisono", folder=folder, dry=record_folder)
        )
        try:
            with suppress(SystemExit):
                runpy.run_path(sys.argv[0], run_name="__main__")
        except SettingsError as error:
            return str(error)
    return ""


def dry_run_error(folder: Path, script: str, words: str, size: int = 2) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "gpt.py").write_text(script)
    found: str = run_ranks(_dry_run, 1, str(folder), words.split(), size)[0]
    return found


LOOP = "    for step in run.steps(data):"
EVALUATED = "    assert not run.evaluate(model, data, loss, forward=lambda m, b: m(b[0][:, :-1]))['loss'] < 3\n"
DIVIDED = MODEL.replace("GPT(run.settings))", "GPT(run.settings), sequence=unisono.SequenceDims())").replace(
    "[:, :-1]", ""
)


@pytest.mark.parametrize(
    "script",
    [
        MODEL.replace(LOOP, EVALUATED + LOOP),
        MODEL.replace(
            "loss, forward=lambda m, b: m(b[0][:, :-1])", "loss, mean=True, forward=lambda m, b: m(b[0][:, :-1])"
        ),
    ],
    ids=["evaluation before the loop", "mean"],
)
def test_the_first_forward_pass_is_checked_in_any_call(tmp_path: Path, script: str) -> None:
    assert "3 heads" in dry_run_error(tmp_path, script, "--set parallel.tensor=2")


def test_heads_must_be_divisible_by_context(tmp_path: Path) -> None:
    assert "no multiple of 2" in dry_run_error(tmp_path, DIVIDED, "--set parallel.context=2")
    assert not dry_run_error(tmp_path / "run", DIVIDED, "--set parallel.context=2 --set heads=4")


@pytest.mark.parametrize(
    "frozen",
    [
        pytest.param(EVALUATED + "    model.head.requires_grad_(False)\n" + LOOP, marks=pytest.mark.slow),
        LOOP + "\n        model.head.requires_grad_(False)",
    ],
)
def test_parameters_frozen_before_the_first_gradient_are_not_refused(tmp_path: Path, frozen: str) -> None:
    words = "--set compress.kind=int8 --set dtype=float64"
    assert not dry_run_error(tmp_path, MODEL.replace(LOOP, frozen), words)


def test_a_pass_sees_its_own_parameters(tmp_path: Path) -> None:
    first = "optimizer = torch.optim.AdamW(model.embed.parameters())\n" + LOOP
    script = MODEL.replace(LOOP, "    " + first).replace("b[0][:, :-1]))", "b[0][:, :-1]), over=[optimizer])")
    assert not dry_run_error(tmp_path, script, "--set compress.kind=int8 --set dtype=float64")


def test_integer_parameters_that_are_not_trained_are_not_refused(tmp_path: Path) -> None:
    words = "--set compress.kind=int8 --set counts=true"
    assert "register_buffer" in dry_run_error(tmp_path / "all", MODEL, words)
    named = MODEL.replace("b[0][:, :-1]))", "b[0][:, :-1]), over=[optimizer])")
    assert "register_buffer" in dry_run_error(tmp_path / "all named", named, words)
    trains = named.replace("AdamW(model.parameters()", "AdamW([p for p in model.parameters() if p.requires_grad]")
    assert not dry_run_error(tmp_path / "those that train", trains, words)


def test_code_after_unisono_main_is_not_part_of_a_dry_run(tmp_path: Path) -> None:
    more = "\n    Path(__file__).with_name('after').touch()\n"
    alone = (
        "    world = unisono.World.current()\n    assert not world.is_main and world.rank == 1\n    with run.first():"
    )
    script = MODEL.replace("main(main, Settings)", "main(main, Settings)" + more).replace(
        "    with run.first():", alone
    )
    assert "3 heads" in dry_run_error(tmp_path, script, "--set parallel.tensor=2")
    script = script.replace("heads: int = 3", "heads: int = 2")
    assert not dry_run_error(tmp_path, script, "--set parallel.tensor=2")
    assert not (tmp_path / "after").exists()
