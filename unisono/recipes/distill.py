"""Shrink a language model that the text recipe has trained, to about a quarter, by distillation.

    unisono run text --ranks 2 --set steps=400 --run-dir runs/teacher    train the teacher well
    unisono run distill --ranks 2 --set teacher=runs/teacher             about two minutes on two cores
    unisono copy distill mine.py                                         then edit it and: unisono run mine.py

Data     the source code that comes with Python, as for the text recipe
Student  half of the teacher's channels, heads and neurons (arXiv 2401.15024 and 2407.14679) as a start, trained with
         the teacher's outputs (soft targets, arXiv 1503.02531)
Result   1.62 bits per byte for the teacher, 1.81 for the student, and 2.62 for a model of the student's size that has
         no teacher, begins with random weights and is trained for as many steps, on the same batches
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unisono
from unisono import distill
from unisono.recipes.datasets.python_source import IGNORED, ByteWindows, load_python_source
from unisono.recipes.text import GPT, Block, Model, bits_per_byte, loss_sum, predict_windows

SAMPLE = 64
"""Windows of the training data that show which channels, heads and neurons matter."""


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    batch: int = 64  # global batch size, in windows of bytes
    steps: int | None = 100
    lr: float = 1.5e-2  # peak learning rate of the one-cycle schedule
    weight_decay: float = 0.1  # weight decay of AdamW
    clip: float | None = 1.0
    validate_bytes: int = 2**17  # number of validation bytes to use, of about 600,000
    teacher: Path | None = None  # run directory of the teacher: a run of the text recipe
    heads: int | None = None  # attention heads of the student; its width is in proportion. none: half of the teacher's
    keep: tuple[int, ...] | None = None  # the teacher's blocks that the student begins with; none: all
    temperature: float = 1.0  # of the soft targets
    soft: float = 0.9  # weight of the soft targets in the loss; that of the data is 1 - soft
    compare: bool = True  # train a model of the student's size alone, too

    def __post_init__(self) -> None:
        """Refuse values that the student cannot be built with."""
        if self.keep == ():
            raise unisono.SettingsError("keep=[] leaves no block.", "The student needs one.", "--set 'keep=[0]'")
        if self.parallel.pipeline > 1:
            raise unisono.SettingsError(
                f"The distill recipe cannot have parallel.pipeline={self.parallel.pipeline}.",
                "Teacher and student would be in stages of their own, which wait for each other.",
                f"--set parallel.pipeline=1 --set parallel.shard={self.parallel.pipeline}",
            )


def main(run: unisono.Run[Settings]) -> None:
    settings = run.settings
    if settings.teacher is None or not settings.teacher.exists():
        raise unisono.SettingsError(
            "The distill recipe needs a teacher."
            if settings.teacher is None
            else f"There is no folder {settings.teacher}.",
            "The teacher is a run of the text recipe: unisono run text --run-dir runs/teacher",
            "--set teacher=runs/teacher",
        )
    source = unisono.SavedWeights(settings.teacher)
    try:
        large = Model(**source.settings["model"])
    except (LookupError, TypeError):
        fact, do = "Its settings have no model of that recipe.", "--set teacher=FOLDER, from: unisono run text"
        raise unisono.SettingsError(f"{settings.teacher} is no run of the text recipe.", fact, do) from None
    small, keep = shrink(large, settings)
    corpus = load_python_source()
    run.print(corpus.summary())
    train_set = ByteWindows(corpus.train, large.context)
    valid_set = ByteWindows(corpus.valid[: settings.validate_bytes], large.context)
    total_steps = run.count_steps(train_set)

    angles = unisono.SequenceDims(positions={"cos": 0, "sin": 0})  # context parallelism divides these, too
    teacher = run.place(lambda: source.load_frozen(GPT(large)), sequence=angles)
    sample = torch.stack([train_set[window][0] for window in range(0, len(train_set), -(-len(train_set) // SAMPLE))])
    student = run.place(prune(cut(source.load(GPT(large)), keep), small, sample), sequence=angles)
    optimizer, schedule = optimize(student, settings, total_steps)
    run.track(teacher=source, student=student, optimizer=optimizer, schedule=schedule)
    if settings.compare:
        alone = run.place(lambda: GPT(small), sequence=angles)
        optimizer_alone, schedule_alone = optimize(alone, settings, total_steps)
        run.track(alone=alone, optimizer_alone=optimizer_alone, schedule_alone=schedule_alone)

    def distilled_loss(output: Tensor, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the cross entropies with the teacher's distribution and with the targets, in nats."""
        with torch.no_grad():
            expected = teacher(tokens)
        counts = targets != IGNORED
        soft = distill.soft_target_loss(output, expected, temperature=settings.temperature, mask=counts)
        hard, weight = loss_sum(output, tokens, targets)
        return settings.soft * soft + (1 - settings.soft) * hard, weight

    for step in run.steps(train_set):
        if settings.compare:
            step.run(alone, loss_sum, over=[optimizer_alone])
            step.update(optimizer_alone, schedule_alone, clip=settings.clip)
            run.log(loss_alone=step.loss)
        step.run(student, distilled_loss, over=[optimizer])
        step.update(optimizer, schedule, clip=settings.clip)
        run.log(loss=step.loss)

    models = {"teacher": teacher, "student": student, **({"alone": alone} if settings.compare else {})}
    sizes = {"teacher": large, "student": small, "alone": small}
    for name, model in models.items():
        measured = run.evaluate(model, valid_set, bits_per_byte)["bits_per_byte"]
        run.log({f"{name}_bits_per_byte": measured})
        run.print(f"{name:8} {size(sizes[name]):>9,} parameters   {measured:.3f} bits per byte")


def shrink(large: Model, settings: Settings) -> tuple[Model, tuple[int, ...]]:
    """Return the shape of the student, and the teacher's blocks that it begins with."""
    keep = tuple(range(large.depth)) if settings.keep is None else settings.keep
    if max(keep) >= large.depth or min(keep) < 0:
        raise unisono.SettingsError(
            f"The teacher has no block {max(keep, key=abs)}.",
            f"It has {large.depth}: 0 to {large.depth - 1}.",
            f"--set 'keep=[{large.depth // 2}]'",
        )
    heads = max(1, large.heads // 2) if settings.heads is None else settings.heads
    if not 1 <= heads <= large.heads:
        raise unisono.SettingsError(
            f"The student cannot have heads={heads}.",
            f"It begins with heads of the teacher, which has {large.heads} in each block.",
            f"--set heads={max(1, large.heads // 2)}",
        )
    for axis, size in (("tensor", settings.parallel.tensor), ("context", settings.parallel.context)):
        if heads % size:
            more = size * -(-heads // size)
            raise unisono.SettingsError(
                f"The distill recipe cannot have parallel.{axis}={size} with a student of {heads} heads.",
                f"Each process computes whole heads. The teacher has {large.heads} in each block.",
                f"--set heads={more}" if more <= large.heads else f"--set parallel.{axis}={math.gcd(heads, size)}",
            )
    return replace(large, depth=len(keep), heads=heads, width=heads * (large.width // large.heads)), keep


def cut(model: GPT, keep: tuple[int, ...]) -> GPT:
    """Return a model with some of its blocks only."""
    model.blocks = nn.ModuleList(model.blocks[block] for block in keep)
    return model


@torch.no_grad()
def prune(large: GPT, shape: Model, sample: Tensor) -> GPT:
    """Return a narrower model that begins with what the large one computes for a sample of windows.

    Its channels are the principal components of the large one's states (SliceGPT, arXiv 2401.15024). It has the heads
    and neurons that contribute most to these states (Minitron, arXiv 2407.14679).
    """
    if shape.width == large.tokens.embedding_dim:
        return large
    seen: dict[nn.Module, Tensor] = {}
    hooks = [module.register_forward_pre_hook(lambda m, args: seen.update({m: args[0]})) for module in large.modules()]
    large.eval()(sample)
    for hook in hooks:
        hook.remove()
    norms = [large.norm, *(norm for block in blocks(large) for norm in (block.norm_look, block.norm_think))]
    states = torch.cat([F.rms_norm(seen[norm], norm.normalized_shape).flatten(0, 1) for norm in norms]).cpu().double()
    energy, components = torch.linalg.eigh(states.T @ states)  # from the smallest to the largest
    base = components[:, -shape.width :].to(sample.device, torch.float32)
    # A norm divides by the root of the mean over channels: fewer channels, and not all of the sum of squares.
    gain = math.sqrt(len(energy) / shape.width * energy[-shape.width :].sum() / energy.sum())

    small = GPT(shape)
    small.tokens.weight.copy_(large.tokens.weight @ base)
    small.norm.weight.copy_(base.square().T @ large.norm.weight * gain * large.scale / small.scale)
    for new, old in zip(blocks(small), blocks(large), strict=True):
        new.norm_look.weight.fill_(gain)
        new.norm_think.weight.fill_(gain)
        outputs = old.look.weight.unflatten(1, (-1, old.head_width))  # [channels, heads, width per head]
        parts = torch.einsum("blhk,chk->blhc", seen[old.look].unflatten(-1, (-1, old.head_width)), outputs)
        heads = parts.square().sum((0, 1, 3)).topk(shape.heads).indices.sort().values
        inputs = (old.query_key_value.weight * old.norm_look.weight) @ base
        new.query_key_value.weight.copy_(inputs.unflatten(0, (-1, 3, old.head_width))[heads].flatten(0, 2))
        new.look.weight.copy_(base.T @ outputs[:, heads].flatten(1))
        parts = seen[old.down].square().sum((0, 1)) * old.down.weight.square().sum(0)
        neurons = parts.topk(4 * shape.width).indices.sort().values
        new.up.weight.copy_((old.up.weight * old.norm_think.weight)[neurons] @ base)
        new.down.weight.copy_(base.T @ old.down.weight[:, neurons])
    return small


def blocks(model: GPT) -> list[Block]:
    """Return the blocks."""
    return [block for block in model.blocks if isinstance(block, Block)]


def optimize(
    model: nn.Module, settings: Settings, total_steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return the optimizer and the schedule of the text recipe."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=(0.9, 0.99), weight_decay=settings.weight_decay
    )
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.lr, total_steps=total_steps)


def size(model: Model) -> int:
    """Return the number of parameters."""
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(model).parameters())


def predict(settings: Settings, model: nn.Module, path: Path) -> unisono.Prediction:
    """Predict the bits per byte of a file, for each window of as many bytes as the teacher was trained on."""
    return predict_windows(ByteWindows(path.read_bytes(), len(model.get_buffer("cos"))))


if __name__ == "__main__":
    unisono.main(main, Settings, predict=predict)
