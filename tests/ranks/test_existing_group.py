"""A process group that the script has made is used or refused; no process trains alone silently."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import unisono
from unisono import environment
from unisono.environment import World
from unisono.errors import LoopError, WorldError
from unisono.testing import run_ranks


def train(run: unisono.Run[unisono.Settings]) -> None:
    model = run.place(lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    points = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))
    for step in run.steps(torch.utils.data.TensorDataset(points)):
        for (x,) in step:
            step.backward((model(x) - x.sum(1, keepdim=True)).square().sum(), weight=len(x))
        step.update(optimizer)


def join(world: World, folder: Path) -> None:
    """Initialize torch's group, as scripts do that start their processes themselves."""
    store = dist.FileStore(str(folder / "own-store"), world.size)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    store.set(f"joined-{world.rank}", "1")  # a process that ends early would break the connections of others
    store.wait([f"joined-{rank}" for rank in range(world.size)])


def script(world: World, folder: str, when: str, run_dir: str, times: int = 1) -> bool:
    """Run a script whose processes no launcher of ours has started.

    `when` it calls init_process_group: before, inside, never.
    """
    gc.freeze()
    os.chdir(folder)
    environment.assign(None)
    sys.argv = ["script.py", "--set=steps=3", "--set=batch=16", f"--run-dir={folder}/{run_dir}"]
    sys.stdout = sys.stderr

    def inside(run: unisono.Run[unisono.Settings]) -> None:
        join(world, Path(folder))
        train(run)

    if when == "before":
        join(world, Path(folder))
    for n in range(times):
        sys.argv[-1] = f"--run-dir={folder}/{run_dir}{n or ''}"
        unisono.main(inside if when == "inside" else train)
    return dist.is_initialized()


def refused(world: World, folder: str, when: str) -> tuple[str, str]:
    try:
        script(world, folder, when, f"alone-{world.rank}")
    except LoopError as error:
        return error.problems[0].error, error.problems[0].facts
    return "", ""


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_an_existing_group_is_used_with_the_same_bits(tmp_path: Path) -> None:
    """Two runs use one group, which still exists afterwards."""
    assert run_ranks(script, 1, str(tmp_path), "never", "alone") == [False]
    assert run_ranks(script, 2, str(tmp_path), "before", "both", 2) == [True, True]
    alone, *both = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("alone", "both", "both1")]
    assert [result["ranks"] for result in both] == [2, 2]
    assert {result["weights_sha256"] for result in both} == {alone["weights_sha256"]}
    assert all(result["promise"].startswith("exact") for result in both)


def test_a_group_made_inside_main_is_refused(tmp_path: Path) -> None:
    message = "This run has 1 process, and the group 2: each would train alone."
    assert (
        run_ranks(refused, 2, str(tmp_path), "inside")
        == [("init_process_group was called inside the script's main function.", message)] * 2
    )


def under_our_launcher(world: World, folder: str) -> str:
    from unisono.distributed.existing_group import take_over

    join(world, Path(folder))
    try:
        take_over(World(rank=world.rank, size=2, launcher="unisono"))
    except WorldError as error:
        return error.problems[0].facts
    return ""


def test_an_existing_group_is_refused_under_unisono_run(tmp_path: Path) -> None:
    message = "It made a group of 2; unisono run has started 2 and joins them itself."
    assert run_ranks(under_our_launcher, 2, str(tmp_path)) == [message] * 2


def without_a_back_end(world: World, folder: str) -> str:
    from unisono.distributed import existing_group

    join(world, Path(folder))
    try:
        existing_group.use_group(torch.device("cuda"), "nccl")
    except WorldError as error:
        return error.problems[0].remedy
    return ""


def test_a_group_without_the_back_end_for_the_device_is_refused(tmp_path: Path) -> None:
    """torch's gloo accepts tensors of an accelerator as well, but lacks some collectives for them."""
    (message,) = run_ranks(without_a_back_end, 1, str(tmp_path))
    assert message.startswith('init_process_group("nccl", ...), or remove init_process_group')
