"""A run that needs more memory than there is says what holds how much of it, and what to set."""

from __future__ import annotations

import sys

import pytest

from tests.cli.command import Command

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
