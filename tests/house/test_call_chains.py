"""There are few frames of Unisono between a script and torch: counted on the stack in small runs of two processes.

A chain begins where the script calls Unisono, or where a `for` asks it for the next item, and ends where Unisono calls
torch, the script's own code, or the writer of checkpoints. Each number may only fall.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.house.sources import LIBRARY, ROOT
from unisono.checkpoint.save import CheckpointSaver
from unisono.config import CheckpointSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.testing import build_run, close_run, run_ranks

MOST = {
    "step.backward to torch": 1,
    "step.backward to a collective": 3,
    "the end of the inner loop to a collective": 5,
    "the end of the inner loop to the whole sum": 6,
    "the next micro-batch to the data set": 4,
    "run.evaluate to the model": 4,
    "the end of a step to the checkpoint writer": 4,
}
"""Own functions in the longest chain of each kind."""

COLLECTIVES = (
    "isend irecv batch_isend_irecv all_reduce all_to_all_single all_gather_into_tensor all_gather_single broadcast"
)


def own_frames() -> list[str]:
    """Return our functions on the stack, from the script inwards."""
    names: list[str] = []
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == __file__ and frame.f_code.co_name == "train":
            break
        name = frame.f_code.co_name
        if frame.f_code.co_filename.startswith(str(LIBRARY)) and not name.startswith("<"):  # a comprehension is none
            names.append(name)
    return names[::-1]


class Chains:
    """The longest chain of each kind so far."""

    def __init__(self) -> None:
        self.seen: dict[str, list[str]] = {}

    def note(self, kind: str) -> None:
        frames = own_frames()
        if len(frames) > len(self.seen.get(kind, [])):
            self.seen[kind] = frames

    def watch(self, owner: Any, name: str, note: Callable[[], None]) -> None:
        """Call `note` whenever this function is called, in the rest of this process."""
        function = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            note()
            return function(*args, **kwargs)

        setattr(owner, name, watched)


class Data(torch.utils.data.Dataset[Any]):
    def __init__(self, chains: Chains) -> None:
        self.chains = chains

    def __len__(self) -> int:
        return 16

    def __getitem__(self, sample: int) -> torch.Tensor:
        self.chains.note("the next micro-batch to the data set")
        return torch.full((4,), float(sample))


class Model(torch.nn.Sequential):
    def __init__(self, chains: Chains) -> None:
        super().__init__(torch.nn.Linear(4, 64), torch.nn.Linear(64, 1))
        self.chains = chains

    def forward(self, x: torch.Tensor) -> Any:
        if not self.training:
            self.chains.note("run.evaluate to the model")
        return super().forward(x)


def chains_of_a_run(world: World, folder: str) -> dict[str, list[str]]:
    chains = Chains()
    with join(world) as group:
        run = build_run(
            Settings(steps=3, batch=8, virtual_ranks=4, checkpoint=CheckpointSettings(every=1)),
            world,
            group,
            Path(folder),
        )
        train(run, chains)
        close_run(run)
    return chains.seen


def train(run: Any, chains: Chains) -> None:
    model = run.place(Model(chains))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    watch(chains)
    for step in run.steps(Data(chains)):
        for x in step:
            step.backward(model(x).square().sum(), weight=len(x))
        step.update(optimizer)
    run.evaluate(model, torch.utils.data.TensorDataset(torch.ones(8, 4)), lambda out, x: (out.sum(), len(x)))


def watch(chains: Chains) -> None:
    """Note the chains to torch and to the writer of checkpoints from now on."""

    def collective() -> None:
        frames = own_frames()
        if frames[:1] == ["backward"]:
            chains.note("step.backward to a collective")
        elif frames[:1] == ["_rounds"] and "reduce" not in frames and "gather" not in frames:
            chains.note("the end of the inner loop to the whole sum" if "finish" in frames else ROUNDS_END)

    for name in COLLECTIVES.split():
        if hasattr(dist, name):
            chains.watch(dist, name, collective)
    chains.watch(torch.Tensor, "backward", lambda: chains.note("step.backward to torch"))
    chains.watch(CheckpointSaver, "begin", lambda: chains.note("the end of a step to the checkpoint writer"))


ROUNDS_END = "the end of the inner loop to a collective"


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for seen in run_ranks(chains_of_a_run, 2, str(tmp_path_factory.mktemp("run"))):
        for kind, frames in seen.items():
            if len(frames) > len(found.get(kind, [])):
                found[kind] = frames
    return found


@pytest.mark.parametrize("kind", MOST)
def test_a_chain_has_few_frames_of_unisono(chains: dict[str, list[str]], kind: str) -> None:
    assert chains.get(kind), f"no chain from {kind} was seen"
    frames = chains[kind]
    assert len(frames) <= MOST[kind], " > ".join(frames)


def test_the_docs_show_these_numbers() -> None:
    page = (ROOT / "docs" / "design" / "gradient.md").read_text(encoding="utf-8")
    assert [kind for kind, count in MOST.items() if f"| {kind} | {count} |" not in page] == []
