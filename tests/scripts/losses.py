"""Choose the loss of a script: a function loss_of(out, x, y) -> (sum, weight), or (mean, weight)."""

from __future__ import annotations

from typing import NamedTuple

from tests.scripts.data import Task
from tests.scripts.draft import Draft


class Loss(NamedTuple):
    """A loss. With `mean`, it is a mean over the weight."""

    mean: bool


def draw_loss(draft: Draft, task: Task) -> Loss:
    more: list[str] = []
    if task.target == "class":
        mean, value, weight = class_loss(draft, task, more)
    elif task.target == "tokens":
        mean, value, weight = token_loss(draft, task)
    elif task.target == "labels":
        more += ["out = out.log_softmax(-1).transpose(0, 1)", "lengths = torch.full((len(y),), len(out))"]
        more += ["labels = torch.full((len(y),), y.shape[1])"]
        value = 'F.ctc_loss(out, y, lengths, labels, reduction="sum", zero_infinity=True)'
        mean, weight = False, draft.pick(["len(y)", "labels.sum()"])
    else:
        mean, value, weight = number_loss(draft, task)
    arguments = "out, x, y, w" if task.weighted else "out, x, y"
    if task.mapping:
        arguments, more = "out, batch", ['x, y = batch["x"], batch["y"]', *more]
    lines = [f"def loss_of({arguments}):", *(f"    {line}" for line in more), f"    return {value}, {weight}"]
    draft.define("\n".join(lines))
    return Loss(mean)


def class_loss(draft: Draft, task: Task, more: list[str]) -> tuple[bool, str, str]:
    if task.weighted:
        return False, '(F.cross_entropy(out, y, reduction="none") * w.to(out.dtype)).sum()', "w.sum()"
    kind = draft.often(
        plain=4, smooth=1, weights=1, ignore=1, nll=1, mean=1.5, kl=0.7, margin=0.7, bce=0.7, triplet=0.5
    )
    hot = f"F.one_hot(y, {task.classes}).to(out.dtype)"
    if kind == "mean":
        return True, "F.cross_entropy(out, y)", "len(y)"
    if kind == "smooth":
        return False, 'F.cross_entropy(out, y, label_smoothing=0.1, reduction="sum")', "len(y)"
    if kind == "weights":
        draft.define(f"WEIGHTS = torch.linspace(0.5, 1.5, {task.classes})")
        more += ["weights = WEIGHTS.to(out.dtype)"]
        return False, 'F.cross_entropy(out, y, weights, reduction="sum")', "weights[y].sum()"
    if kind == "ignore":
        more += ["y = y.masked_fill((y == 1) & (torch.arange(len(y)) > 0), -100)"]  # at least one label counts
        return False, 'F.cross_entropy(out, y, ignore_index=-100, reduction="sum")', "(y != -100).sum()"
    if kind == "nll":
        return False, 'F.nll_loss(out.log_softmax(-1), y, reduction="sum")', "len(y)"
    if kind == "kl":
        more += [f"goal = 0.9 * {hot} + 0.1 / {task.classes}"]
        return False, 'F.kl_div(out.log_softmax(-1), goal, reduction="sum")', "len(y)"
    if kind == "margin":
        return False, 'F.multi_margin_loss(out, y, reduction="sum")', "len(y)"
    if kind == "bce":
        return False, f'F.binary_cross_entropy_with_logits(out, {hot}, reduction="sum")', "out.numel()"
    if kind == "triplet":
        more += ["near = F.triplet_margin_loss(out, out.roll(1, 0), -out, reduction='sum')"]
        return False, 'F.cross_entropy(out, y, reduction="sum") + 0.1 * near', "len(y)"
    return False, 'F.cross_entropy(out, y, reduction="sum")', "len(y)"


def token_loss(draft: Draft, task: Task) -> tuple[bool, str, str]:
    if draft.chance(0.2):
        value = "F.cross_entropy(out.flatten(0, 1), y.flatten())"
        return True, value, "(y != -100).sum()"
    smooth = draft.pick(["", ", label_smoothing=0.1"])
    value = f'F.cross_entropy(out.flatten(0, 1), y.flatten(){smooth}, reduction="sum")'
    return False, value, draft.pick(["(y != -100).sum()", "int((y != -100).sum())"])


def number_loss(draft: Draft, task: Task) -> tuple[bool, str, str]:
    if task.target == "binary":
        name = draft.pick(["binary_cross_entropy_with_logits", "soft_margin_loss", "mse_loss"])
        return False, f'F.{name}(out, y.to(out.dtype), reduction="sum")', "len(y)"
    if task.target == "soft":
        if draft.chance(0.5):
            return False, 'F.kl_div(out.log_softmax(-1), y.to(out.dtype), reduction="sum")', "len(y)"
        return False, 'F.cross_entropy(out, y.to(out.dtype), reduction="sum")', "len(y)"
    name = draft.pick(["mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss", "poisson_nll_loss"])
    if draft.chance(0.25):
        return True, f"F.{name}(out, y.to(out.dtype))", "out.numel()"
    return False, f'F.{name}(out, y.to(out.dtype), reduction="sum")', draft.pick(["out.numel()", "len(y)"])
