"""Violations of the contract of the loop: untracked state that depends on the layout.

A script with a violation says so in its docstring. It has no promise of exact bits, and the run should detect it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.scripts.data import Task
from tests.scripts.draft import Draft


@dataclass
class Break:
    """A violation: its name ("" if there is none), and lines before the loop, per micro-batch, and after the update."""

    name: str = ""
    made: list[str] = field(default_factory=list)
    in_round: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


GENERATOR = ["loss = loss * (1 + 0.1 * torch.rand((), generator=GENERATOR))"]


def draw_break(draft: Draft, task: Task) -> Break:
    if not draft.chance(0.08):
        return Break()
    kind = draft.often(list=1, generator=1, rank=1, rounds=1, variable=1)
    if kind == "list":
        draft.define("SEEN = []")
        lines = ["SEEN.append(float(loss.detach()))", "loss = loss / (1 + 0.1 * abs(sum(SEEN) / len(SEEN)))"]
        return Break("a list that the rounds fill", in_round=lines)
    if kind == "generator":
        draft.define("GENERATOR = torch.Generator().manual_seed(5)")
        return Break("a generator of the script's own, drawn from in the rounds", in_round=GENERATOR)
    if kind == "rank":
        return Break("a loss that depends on run.rank", in_round=["loss = loss * (1 + 0.1 * run.rank)"])
    if kind == "rounds":
        lines = ["rounds += 1", "loss = loss * (1 + 0.01 * rounds)"]
        return Break("a counter of rounds", made=["rounds = 0"], in_round=lines)
    lines = ["best = min(best, step.loss)", f"for group in {'{optimizer}'}.param_groups:"]
    lines += ['    group["lr"] *= 1.0 if step.loss <= best else 0.5']
    return Break("a variable that a resume forgets", made=['best = float("inf")'], after=lines)
