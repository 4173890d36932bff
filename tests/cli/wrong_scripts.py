"""Scripts whose result depends on the placement, each with the cause and place that `unisono check` must report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

SCRIPT = """
import os, random, time
import numpy as np
import torch, unisono
import torch.distributed as dist
from torch.utils.data import get_worker_info

WORDS = ["apple", "pear", "plum", "fig", "date", "lime"]
SEEN = []

class Data(torch.utils.data.Dataset):
    def __init__(self, run):
        self.run, self.count = run, 0
        {make}
    def __len__(self):
        return 30
    def __getitem__(self, i):
        x = torch.tensor([i / 10, 1.0, i % 3 - 1.0])
        {fetch}
        return x, i

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
    def forward(self, x):
        x = self.first(x).tanh()
        {forward}
        return self.last(x)

def main(run):
    {before}
    model = run.place(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(Data(run)):
        for x, i in step:
            loss = (model(x)[:, 0] - x.sum(1)).pow(2).sum()
            {loss}
            step.backward(loss, len(i))
        {after}
        step.update(optimizer)

unisono.main(main, unisono.Settings)
"""
EMPTY = dict.fromkeys(("make", "fetch", "forward", "before", "loss", "after"), "pass")


def text_of(changes: Mapping[str, str]) -> str:
    """Return the script with these changes."""
    return SCRIPT.format(**{**EMPTY, **changes})


class Wrong(NamedTuple):
    changes: dict[str, str]
    cause: str
    what: str  # the first difference
    step: int = 0
    virtual_rank: int = 0  # -1: the whole step


WRONG = {
    "a generator seeded by time, in the data": Wrong(
        {"make": "self.rng = np.random.default_rng()", "fetch": "x = x + float(self.rng.random())"},
        "unkeyed-data",
        "the samples",
    ),
    "the order of a set": Wrong(
        {
            "make": "self.words = list(set(WORDS))",
            "fetch": "x = x + WORDS.index(self.words[i % 6])",
        },
        "set-order",
        "the samples",
    ),
    "a generator of its own, in the data": Wrong(
        {"make": "self.rng = np.random.default_rng(0)", "fetch": "x = x + float(self.rng.random())"},
        "data-state",
        "the samples",
        virtual_rank=4,
    ),
    "a data set that counts": Wrong(
        {"fetch": "self.count += 1; x = x * (1 + self.count)"},
        "data-state",
        "the samples",
        virtual_rank=4,
    ),
    "a data set that asks for the rank": Wrong(
        {"fetch": "x = x + self.run.rank"},
        "data-process",
        "the samples",
        virtual_rank=4,
    ),
    "a data set that asks for its worker": Wrong(
        {"fetch": "x = x + (get_worker_info() is not None)"},
        "data-worker",
        "the samples",
    ),
    "a generator seeded by time, in the loop": Wrong(
        {
            "before": "noise = torch.Generator(); noise.seed()",
            "loss": "loss = loss * (1 + torch.rand((), generator=noise))",
        },
        "unkeyed-loop",
        "the loss",
    ),
    "a running mean of the losses": Wrong(
        {"before": "mean = []", "loss": "mean.append(float(loss)); loss = loss / (1 + sum(mean) / len(mean))"},
        "state",
        "the loss",
        virtual_rank=4,
    ),
    "a loss divided by the number of processes": Wrong(
        {"loss": "loss = loss / run.size"},
        "asks-rank",
        "the loss",
    ),
    "a loss divided by a size that was read before the loop": Wrong(
        {"before": "size = dist.get_world_size() if dist.is_initialized() else 1", "loss": "loss = loss / size"},
        "asks-rank",
        "the loss",
    ),
    "a collective of its own": Wrong(
        {"loss": "n = torch.ones(()); dist.is_initialized() and dist.all_reduce(n); loss = loss * n"},
        "collective",
        "the loss",
    ),
    "another number of threads": Wrong(  # reported even if the bits happen to be equal
        {"before": "torch.set_num_threads(3 - min(run.size, 2))"},
        "threads",
        "the number of threads",
    ),
    "an operator that torch calls nondeterministic": Wrong(  # imitated by the clock
        {"forward": "x = x + 1e-3 * torch.zeros(9).put_(torch.tensor([0, 0]), torch.rand(2) + time.time() % 1)[0]"},
        "operator",
        "the loss",
    ),
    "a hook with a memory": Wrong(
        {"forward": "x.register_hook(lambda g: (SEEN.append(1), g * len(SEEN))[1])"},
        "backward",
        "the gradient of",
        virtual_rank=4,
    ),
    "an exchange that is not exact": Wrong({}, "exchange", "the sum of the gradients of", virtual_rank=-1),
    "noise on the gradient, by rank": Wrong(
        {"after": "[p.grad.add_(1e-3 * run.rank) for p in model.parameters()]"},
        "asks-rank",
        "the gradient of first.weight that the update got",
        virtual_rank=-1,
    ),
    "a generator of its own, in the loop": Wrong(
        {"before": "chance = random.Random(4)", "loss": "loss = loss * (1 + chance.random())"},
        "state",
        "the loss",
        virtual_rank=4,
    ),
}
