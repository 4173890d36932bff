"""Shrink models of the recipes text, image and speech in all ways that there are, and compare quality, size and time.

    python -m benchmarks.shrink --folder build/shrink      a stopped benchmark continues there

The original trains all steps, and everything else trains a quarter of them. Quantization-aware training and pruning
continue from the original, and so does a control that is not changed. Students have about a quarter of the original's
weights. One is trained alone, one begins with layers of the original, and one of these also has its outputs as soft
targets. For comparison, students train all steps, too.

Quality and loss are means over seeds, on held-out data. The time is the processor time of one batch on one thread,
outside of a run and without a compiler: other programs on the machine do not count.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.machine import line, parser
from unisono import SavedWeights, distill
from unisono.config import CheckpointSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.export.quantization import config_for_training, quantize_linear, quantized_state, without_fake_quantizers
from unisono.pruning import MagnitudePruning
from unisono.recipes import distill as distill_recipe
from unisono.recipes import image, speech, text
from unisono.recipes.datasets.images import load_images
from unisono.recipes.datasets.python_source import IGNORED, ByteWindows, load_python_source
from unisono.recipes.datasets.spoken_words import load_spoken_words
from unisono.testing import build_run, close_run, run_ranks
from unisono.train.run import Run

HOUR = 3600.0
CONTINUED = 0.3
"""The learning rate of a model that continues, relative to that of the original."""

MEASURED = "measured.json"
"""The figures of a model, in the folder of its run."""

CALLS = 30
"""Timed calls of a model."""


@dataclass(frozen=True)
class Task:
    """A recipe: its data, model and measures.

    Attributes:
        steps: Steps of the original.
        build: Builds the original.
        cut: Removes layers from it. The rest is the student.
        forward: Returns logits for training.
        loss: Returns the sum of the loss and its weight.
        mask: Returns which rows of the logits count for soft targets; None: all.
        predict: Returns logits or log probabilities for the measures: [samples, ..., classes].
        targets: Returns the classes that they are compared with.
        temperature: The temperature of soft targets.
        bits: The quality is the number of bits per target; otherwise, it is the accuracy.
    """

    batch: int
    steps: int
    rate: float
    decay: float
    train_set: Dataset[Any]
    valid_set: Dataset[Any]
    build: Callable[[], nn.Module]
    cut: Callable[[Any], nn.Module]
    loss: Callable[..., tuple[Tensor, Any]]
    mask: Callable[[Any], Tensor | None] = lambda batch: None
    forward: Callable[[nn.Module, Any], Tensor] = lambda model, batch: model(batch[0])
    predict: Callable[[nn.Module, Any], Tensor] = lambda model, batch: model(batch[0])
    collate: Callable[[list[Any]], Any] | None = None
    temperature: float = 1.0
    bits: bool = False


def text_task() -> Task:
    """A smaller model than the recipe's, with 0.2 million parameters. The student has one of its four blocks."""
    shape = text.Model(width=64, context=64)
    corpus = load_python_source()
    return Task(
        batch=32,
        steps=400,
        rate=7e-3,
        decay=0.1,
        train_set=ByteWindows(corpus.train, shape.context),
        valid_set=ByteWindows(corpus.valid[: 2**16], shape.context),
        build=lambda: text.GPT(shape),
        cut=lambda model: distill_recipe.cut(model, (0,)),
        loss=text.loss_sum,
        mask=lambda batch: batch[1] != IGNORED,
        bits=True,
    )


def image_task() -> Task:
    """The recipe's model for 1,438 digits. The student has two of its three stages."""
    settings = image.Settings(source="digits")
    data = load_images("digits", None)
    train_set, valid_set = image.build_datasets(data, settings)

    def cut(model: image.ResNet) -> nn.Module:
        model.blocks = nn.Sequential(*list(model.blocks)[:2])
        model.head = nn.Linear(model.head.in_features // 2, model.head.out_features)
        return model

    return Task(
        batch=settings.batch,
        steps=180,
        rate=settings.lr,
        decay=settings.weight_decay,
        train_set=train_set,
        valid_set=valid_set,
        build=lambda: image.ResNet(data.train.images.shape[1:], len(data.classes), settings.model),
        cut=cut,
        loss=image.loss_sum,
    )


def speech_task() -> Task:
    """The recipe's model for 40 of the 104 voices. The student has the third of its four blocks."""
    settings = speech.Settings()
    corpus = load_spoken_words("spoken", data=None, count=40, draws=4, seed=0)

    def cut(model: speech.FrameClassifier) -> nn.Module:
        model.blocks = model.blocks[2:3]
        return model

    return Task(
        batch=settings.batch,
        steps=160,
        rate=settings.lr,
        decay=settings.weight_decay,
        train_set=speech.MelFrames(corpus.train, corpus.rate, settings.model.mels, augment=1.0),
        valid_set=speech.MelFrames(corpus.valid, corpus.rate, settings.model.mels),
        build=lambda: speech.FrameClassifier(settings.model, len(corpus.words)),
        cut=cut,
        loss=speech.loss_sum,
        mask=lambda batch: batch[1],
        forward=speech.frame_logits,
        predict=speech.clip_log_probabilities,
        collate=speech.pad,
        temperature=2.0,
    )


TASKS = {"text": text_task, "image": image_task, "speech": speech_task}


@dataclass(frozen=True)
class Way:
    """How a model is trained.

    Attributes:
        small: It has the layers of the student only.
        start: It begins with weights of the original.
        full: It trains as many steps as the original; otherwise a quarter.
        soft: The weight of soft targets in the loss.
        aware: The quantization that it is prepared for.
        sparsity: The part of its weights that is pruned.
        quantized: Quantizations that are measured after the training.
    """

    small: bool = False
    start: bool = False
    full: bool = False
    soft: float = 0.0
    aware: str = ""
    sparsity: float = 0.0
    quantized: tuple[str, ...] = field(default=("",))


WAYS = {
    "original": Way(full=True, quantized=("", "int8", "int8-dynamic", "int4")),
    "continued": Way(start=True, quantized=("", "int8", "int4")),
    "int8-aware": Way(start=True, aware="int8", quantized=("int8",)),
    "int4-aware": Way(start=True, aware="int4", quantized=("int4",)),
    "pruned, 50 %": Way(start=True, sparsity=0.5),
    "student alone": Way(small=True),
    "student alone, all steps": Way(small=True, full=True),
    "student with layers of the original": Way(small=True, start=True),
    "student distilled": Way(small=True, start=True, soft=0.9),
    "student distilled, all steps": Way(small=True, start=True, full=True, soft=0.9),
}


def build(task: Task, way: Way, original: str) -> nn.Module:
    """Build a model before its training."""
    model = task.build()
    if original:
        SavedWeights(original).load(model)
    if way.small:
        model = task.cut(model)
    if way.aware:
        from torchao.quantization import quantize_  # here, because it takes seconds

        quantize_(model, config_for_training(way.aware), filter_fn=lambda layer, _: can_prepare(layer))
    return model


def can_prepare(layer: nn.Module) -> bool:
    """Return whether a layer is linear and has whole groups of 32 inputs."""
    return isinstance(layer, nn.Linear) and layer.in_features % 32 == 0


def train(run: Run[Any], task: Task, way: Way, original: str) -> None:
    """Train a model in one of the ways."""
    model = run.place(lambda: build(task, way, original if way.start else ""))
    rate = task.rate * (CONTINUED if way.start and not way.small else 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=task.decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=run.total_steps)
    after: list[Any] = [optimizer, schedule]
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    if way.sparsity:
        end = max(3, run.total_steps * 3 // 5)
        after.append(MagnitudePruning(model, sparsity=way.sparsity, begin=end // 3, end=end, every=max(1, end // 6)))
        run.track(pruning=after[-1])
    loss = task.loss
    if way.soft:
        source = SavedWeights(original)
        teacher = run.place(lambda: source.load_frozen(task.build()))
        run.track(teacher=source)

        def loss(output: Tensor, *batch: Tensor) -> tuple[Tensor, Any]:
            with torch.no_grad():
                expected = task.forward(teacher, batch)
            hard, weight = task.loss(output, *batch)
            soft = distill.soft_target_loss(output, expected, temperature=task.temperature, mask=task.mask(batch))
            return way.soft * soft + (1 - way.soft) * hard, weight

    for step in run.steps(task.train_set, collate_fn=task.collate):
        step.run(model, loss, forward=task.forward)
        step.update(*after, clip=1.0)


def on_rank(world: World, folder: str, settings: Settings, name: str, way: Way, original: str) -> None:
    with join(world) as group:
        run = build_run(settings, world, group, Path(folder), resume=True)
        try:
            train(run, TASKS[name](), way, original)
        finally:
            close_run(run)


class Row(NamedTuple):
    """The measurements of a model."""

    quality: float
    loss: float
    bytes: int
    milliseconds: float


@torch.no_grad()
def measure(model: nn.Module, task: Task) -> Row:
    """Measure a model on the held-out data."""
    right, nats, count = 0, 0.0, 0
    batches = list(DataLoader(task.valid_set, task.batch, collate_fn=task.collate))
    for batch in batches:
        output, targets = task.predict(model, batch), batch[-1]
        counts = targets != IGNORED
        nats += float(F.cross_entropy(output[counts], targets[counts], reduction="sum"))
        right += int((output.argmax(-1) == targets).sum())
        count += int(counts.sum())
    seconds = []
    for _ in range(CALLS):
        begin = time.process_time()
        task.predict(model, batches[0])
        seconds.append(time.process_time() - begin)
    loss = nats / count
    quality = loss / math.log(2) if task.bits else right / count
    return Row(quality, loss, len(save(*quantized_state(model))), 1000 * statistics.median(seconds))


def measured(task: Task, way: Way, folder: str) -> dict[str, Row]:
    """Measure a trained model, in float or in each quantization, and keep the figures with it."""
    trained = SavedWeights(folder).load(build(task, way, "")).eval()
    rows = {}
    for kind in way.quantized:
        model = deepcopy(trained)
        if kind:
            without_fake_quantizers(model, kind)
            quantize_linear(model, kind, plain=False)
        rows[kind] = measure(model, task)
    Path(folder, MEASURED).write_text(json.dumps(rows), encoding="utf-8")
    return rows


def table(name: str, task: Task, rows: dict[str, list[Row]]) -> str:
    """Return a table of the means over seeds, and how close the distilled students are to the original."""
    with torch.device("meta"):
        model = task.build()
    linear = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    share = linear / sum(p.numel() for p in model.parameters())
    measure_name = "Bits per byte" if task.bits else "Accuracy"
    facts = f"{len(rows['original'])} seeds, {task.steps} steps; linear layers: {share:.1%} of the weights"
    lines = [
        f"**{name}**: {facts}.\n",
        f"| Model | {measure_name} | Loss | Bytes | ms |\n|---|---|---|---|---|",
    ]
    for label, found in rows.items():
        quality, loss = (statistics.fmean(values) for values in ([r.quality for r in found], [r.loss for r in found]))
        shown = f"{quality:.4f}" if task.bits else f"{quality:.2%}".replace("%", " %")
        time_of_call = statistics.median(row.milliseconds for row in found)
        lines.append(f"| {label} | {shown} | {loss:.4f} | {found[0].bytes:,} | {time_of_call:.1f} |")
    lines += [recovered(rows, steps, column) for steps in ("", ", all steps") for column in ("quality", "loss")]
    return "\n".join(lines)


def recovered(rows: dict[str, list[Row]], steps: str, column: str) -> str:
    """Return how far a distilled student is from the student alone (0) to the original (1): the mean, and each seed."""
    labels = (f"student alone{steps}", f"student distilled{steps}", "original")
    values = [[getattr(row, column) for row in rows[label]] for label in labels]
    alone, student, original = (statistics.fmean(each) for each in values)
    loss = [statistics.fmean(row.loss for row in rows[label]) for label in labels]
    each = ", ".join(f"{s - a:+.4f} of {o - a:+.4f}" for a, s, o in zip(*values, strict=True))
    if loss[0] <= loss[2] or alone == original:
        return f"\nDistilled{steps}, {column}: the student alone is no worse than the original (seeds: {each})"
    mean = (student - alone) / (original - alone)
    return f"\nDistilled{steps}, {column}: {mean:.2f} of the way from alone to the original (seeds: {each})"


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--recipes", nargs="+", choices=TASKS, default=list(TASKS))
    words.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    words.add_argument("--processes", type=int, default=2)
    words.add_argument("--folder", help="keep the runs there, and continue those that were stopped")
    given = words.parse_args()
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        folder = given.folder or stack.enter_context(tempfile.TemporaryDirectory())
        for name in given.recipes:
            task, rows = TASKS[name](), dict[str, list[Row]]()
            steps = 8 if given.quick else task.steps
            for seed in given.seeds:
                for label, way in WAYS.items():
                    here, original = (f"{folder}/{name}-{seed}-{part}" for part in (label, "original"))
                    count = steps if way.full else steps // 4
                    settings = Settings(steps=count, batch=task.batch, seed=seed + (0 if label == "original" else 100))
                    settings = replace(settings, checkpoint=CheckpointSettings(every=count))
                    known = Path(here, MEASURED)
                    if known.exists():
                        found = {kind: Row(*row) for kind, row in json.loads(known.read_text(encoding="utf-8")).items()}
                    else:
                        run_ranks(on_rank, given.processes, here, settings, name, way, original, seconds=HOUR)
                        found = measured(task, way, here)
                    for kind, row in found.items():
                        rows.setdefault(f"{label}, {kind}" if kind and not way.aware else label, []).append(row)
            print(table(name, task, rows), "\n", flush=True)
    print(line())


if __name__ == "__main__":
    main()
