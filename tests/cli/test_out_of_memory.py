"""A run that needs more memory than there is says what holds how much of it, and what to set."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import Command, Ended, last_json

GREEDY = """
    import resource
    import torch
    from torch import nn

    def main(run):
        model = run.place(lambda: nn.Linear(512, 512))
        optimizer = torch.optim.Adam(model.parameters())
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(torch.utils.data.TensorDataset(torch.ones(64, 512))):
            if step.number == 2:
                used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used + 200 * 2**20, -1))
            for (x,) in step:
                y = model(x)
                if step.number == 2:
                    y = y + torch.zeros(300 * 2**20).sum()
                step.backward(y.square().sum(), weight=len(x))
            step.update(optimizer)

    unisono.main(main)
    """


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space of the process")
def test_the_parts_of_memory_and_settings_that_need_less_are_named(command: Command) -> None:
    command.script(GREEDY)
    words = ("run", "script.py", "--set", "steps=4", "--set", "batch=16", "--set", "virtual_ranks=2")
    ended = command.run(*words, "--run-dir", "out")
    assert ended.status == 1
    assert "Out of memory on cpu in step 2." in ended.err
    assert "This process holds 1.05 MB of parameters, 2.1 MB of optimizer state. torch said: " in ended.err
    assert "--set parallel.activation_checkpoint=full recomputes activations, with the same bits." in ended.err
    assert "--set micro_batch=4 computes fewer samples at a time, with other bits." in ended.err
    assert "OutOfMemoryError" in ended.err
    advice, plan = ended.err.rstrip().splitlines()[-2:]
    assert advice.endswith(" Or: see which placements fit:")
    start, _, memory = plan.strip().partition(" --memory ")
    assert start == "unisono plan script.py"
    assert memory.endswith("MB --set steps=4 --set batch=16 --set virtual_ranks=2")


DEEP = """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))

        def forward(self, x):
            return self.layers(x)

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(8))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    def main(run):
        model = run.place(Deep)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(torch.utils.data.TensorDataset(torch.ones(2, 1))):
            for (x,) in step:
                y = model(x[:, :, None].expand(-1, 80_000, 64))
                step.backward(y.square().sum(), weight=len(x))
            step.update(optimizer)

    if __name__ == "__main__":
        unisono.main(main)
    """
"""A micro-batch keeps 1 GB of activations, and 0.2 GB if they are recomputed."""

MEMORY = Path("/sys/fs/cgroup/memory")
INSIDE = """
import os, sys
with open({procs!r}, "w") as procs:
    procs.write(str(os.getpid()))
from unisono.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """Return a control group of 1.35 GB."""
    path = MEMORY / f"unisono-{os.getpid()}"
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(135 * 10**7))
    except OSError:
        pytest.skip("makes a control group (version 1), for which it must be root")
    yield path
    path.rmdir()


@pytest.mark.slow
def test_the_plan_of_a_run_that_was_killed_for_memory_leads_to_one_that_fits(command: Command, group: Path) -> None:
    command.script(DEEP)

    def inside(*words: str) -> Ended:
        code = INSIDE.format(procs=str(group / "cgroup.procs"))
        return command.end(command.start_python("-P", "-c", code, *words), times=4)

    sets = ("--set", "steps=3", "--set", "batch=1", "--set", "virtual_ranks=1")
    ended = inside("run", "script.py", *sets, "--run-dir", "out")
    assert ended.status == 1
    assert "processes for memory." in ended.err
    plan = ended.last.strip().removeprefix("Next: ")
    assert plan == f"unisono plan script.py --memory 1.35GB {' '.join(sets)}"
    planned = inside(*shlex.split(plan)[1:], "--json")
    assert planned.status == 0, planned.err
    found = last_json(planned.out)
    assert {each["placement"]: each["fits"] for each in found["candidates"]} == {
        "1 replica": False,
        "1 replica, recompute": True,
    }
    assert found["next"] == f"unisono run script.py {' '.join(sets)} --set parallel.activation_checkpoint=full"
    assert inside(*shlex.split(found["next"])[1:]).status == 0
