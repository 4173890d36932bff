"""Generate random training scripts from seeds. A script is a file that a user could have written.

script = draw(17)
Path("script.py").write_text(script.text)          # unisono run script.py --ranks 2
"""

from __future__ import annotations

from collections.abc import Collection

from tests.scripts.broken import Break, draw_break
from tests.scripts.data import Task, draw_data, draw_task
from tests.scripts.draft import Draft, Script
from tests.scripts.known import KNOWN
from tests.scripts.loops import Main
from tests.scripts.losses import draw_loss
from tests.scripts.models import draw_model

HEADER = '''"""A random training script: {what}.{broken}

    unisono run script.py --ranks 2{words}
"""

import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
import unisono
from torch import nn

'''
FOOTER = """

if __name__ == "__main__":
    unisono.main(main, Settings)
"""


def draw(seed: int, left_out: Collection[str] = tuple(KNOWN)) -> Script:
    """Generate the script of a seed, without the traits in `left_out`."""
    draft = Draft(seed, left_out)
    draft.dtype = draft.often(float32=12, float64=1, bfloat16=1.2)
    draft.traits.add(draft.dtype)
    task = draw_task(draft)
    draw_data(draft, task)
    breach = draw_break(draft, task)
    loss = draw_loss(draft, task)
    build = draw_model(draft, task)
    main = Main(draft, task, loss, build, breach)
    breach.after = [line.replace("{optimizer}", "optimizer") for line in breach.after]
    text = main.draw()
    if breach.after:
        text = text.replace("in optimizer.param_groups", f"in {main.optimizer()}.param_groups")
    steps, virtual_ranks = draw_settings(draft, task, by_epochs="run.total_steps" not in text)
    blocks = [settings_class(draft), *draft.top, text]
    what = f"{task.inputs}, target {task.target}"
    broken = f"\n\nIt is wrong on purpose: {breach.name}." if breach.name else ""
    words = "".join(f" --set {word}" for word in draft.words)
    whole = HEADER.format(what=what, broken=broken, words=words) + "\n\n".join(f"\n{block}" for block in blocks)
    return Script(
        seed, whole + "\n" + FOOTER, frozenset(draft.traits), breach.name, virtual_ranks, steps, tuple(draft.words)
    )


def draw_settings(draft: Draft, task: Task, *, by_epochs: bool) -> tuple[int, int]:
    """Choose the number of steps of the complete run, and the number of virtual ranks.

    Args:
        by_epochs: The run may be limited by epochs instead of steps; run.total_steps is then unknown.
    """
    virtual_ranks = draft.pick([1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 8])
    batch = draft.pick([4, 6, 8, 9, 12, 13, 16, 20])
    micro = draft.pick([None, None, None, 1, 2, 3])
    if "batch norm" in draft.traits and draft.chance(0.95):  # batch norm refuses a micro-batch of one sample
        virtual_ranks = min(virtual_ranks, 4)
        batch, micro = 2 * virtual_ranks, None
        if task.data is not None:
            batch = next(n for n in range(batch, 99) if task.count % n in (0, *range(2 * virtual_ranks, n)))
            batch = batch if batch <= 32 else task.count
    if "slices" in draft.traits and draft.chance(0.7):
        micro = 1
    virtual_ranks = min(virtual_ranks, batch)
    steps = draft.pick([4, 5, 6])
    draft.settings |= {"batch: int": str(batch), "virtual_ranks: int": str(virtual_ranks)}
    if by_epochs and task.data is not None and draft.chance(0.3) and (epoch := -(-task.count // batch)) in (3, 4, 5, 6):
        draft.settings["epochs: int | None"] = "1"
        steps = epoch
    else:
        draft.settings["steps: int | None"] = str(steps)
    if micro is not None:
        draft.settings["micro_batch: int | None"] = str(micro)
    if draft.chance(0.3):
        draft.settings["seed: int"] = str(draft.random.randrange(1, 1000))
    if draft.chance(0.25):
        draft.settings["clip: float | None"] = draft.pick(["0.1", "1.0"])
    if draft.dtype == "float32" and draft.chance(0.2):
        precision = draft.pick(["bf16", "fp16"])
        draft.traits.add(precision)
        draft.settings["precision: str"] = f'"{precision}"'
    exchanges(draft, virtual_ranks)
    return steps, virtual_ranks


def exchanges(draft: Draft, virtual_ranks: int) -> None:
    """Choose an exchange that promises exact bits."""
    kind = draft.often(tree=12, wide=1.2, compress=1, audit=0.6)
    draft.traits.add(f"exchange: {kind}")
    if kind == "wide" and (draft.dtype != "float64" or draft.chance(0.1)):
        draft.settings["exchange: str"] = '"wide"'
    elif kind == "compress" and virtual_ranks > 1:
        draft.traits.add("compressed")
        form = draft.pick(["fp16", "bf16", "int8", "topk", "powersgd"])
        draft.words += [f"compress.kind={form}"] + ["compress.ratio=0.3"] * (form == "topk")
    elif kind == "audit":
        draft.settings["audit_every: int"] = "2"


def settings_class(draft: Draft) -> str:
    lines = ["@dataclass(frozen=True, kw_only=True)", "class Settings(unisono.Settings):"]
    return "\n".join([*lines, *(f"    {name} = {value}" for name, value in draft.settings.items())])


__all__ = ["Break", "draw"]
