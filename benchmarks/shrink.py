"""Shrink models of the recipes text, image and speech in all ways that there are, and compare quality, size and time.

    python -m benchmarks.shrink --folder build/shrink              a stopped benchmark continues there
    python -m benchmarks.shrink --folder build/shrink --no-times   without the times, which need a quiet machine

The original trains all steps, and everything else trains a quarter of them. Quantization-aware training and pruning
continue from the original, and so does a control that is not changed. Students have about a quarter of the original's
weights. One is trained alone, one begins with weights of the original, and one of these also has its outputs as soft
targets. For comparison, students train all steps, too.

Quality and loss are means over seeds, on held-out data. The time is the processor time of one batch on one thread,
outside of a run and without a compiler. All times are measured in turns after the training.
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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.machine import line, parser
from benchmarks.shrink_tasks import TASKS, Task
from unisono import SavedWeights, distill
from unisono.config import CheckpointSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.export.quantization import config_for_training, quantize_linear, quantized_state, without_fake_quantizers
from unisono.pruning import MagnitudePruning
from unisono.recipes.datasets.python_source import IGNORED
from unisono.testing import build_run, close_run, run_ranks
from unisono.train.run import Run

HOUR = 3600.0
CONTINUED = 0.3
"""The learning rate of a model that continues, relative to that of the original."""

MEASURED = "measured.json"
"""The figures of a model, in the folder of its run."""

TIMES = "times.json"
"""Its times, there."""

CALLS = 30
"""Timed calls of a model."""

RESAMPLES = 1000
"""Random choices of held-out data for a standard error (bootstrap)."""


@dataclass(frozen=True)
class Way:
    """How a model is trained.

    Attributes:
        small: It is a student.
        start: It begins with weights of the original.
        full: It trains as many steps as the original; otherwise a quarter.
        soft: The loss has soft targets.
        aware: The quantization that it is prepared for.
        sparsity: The part of its weights that is pruned.
        quantized: Quantizations that are measured after the training.
    """

    small: bool = False
    start: bool = False
    full: bool = False
    soft: bool = False
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
    "student with weights of the original": Way(small=True, start=True),
    "student distilled": Way(small=True, start=True, soft=True),
    "student distilled, all steps": Way(small=True, start=True, full=True, soft=True),
}


def build(task: Task, way: Way, original: str) -> nn.Module:
    """Build a model before its training."""
    if not way.small:
        model = SavedWeights(original).load(task.build()) if original else task.build()
    elif not way.start:
        model = task.build_alone()
    else:
        model = task.begin(SavedWeights(original).load(task.build())) if original else task.build_student()
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
    if way.small:
        rate = task.student_rate if way.start else task.alone_rate
    else:
        rate = task.rate * (CONTINUED if way.start else 1)
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
            return task.soft * soft + (1 - task.soft) * hard, weight

    for step in run.steps(task.train_set, collate_fn=task.collate):
        step.run(model, loss, forward=task.forward)
        step.update(*after, clip=1.0)


def on_rank(world: World, folder: str, settings: Settings, name: str, label: str, original: str) -> None:
    with join(world) as group:
        run = build_run(settings, world, group, Path(folder), resume=True)
        try:
            train(run, TASKS[name](), WAYS[label], original)
        finally:
            close_run(run)


class Row(NamedTuple):
    """The measurements of a model.

    Attributes:
        samples: For each held-out sample: targets that it predicts, the loss in nats, and the number of targets.
    """

    samples: list[tuple[int, float, int]]
    bytes: int

    @property
    def totals(self) -> Tensor:
        """The samples: float64 [samples, 3]."""
        return torch.tensor(self.samples, dtype=torch.float64)


def quality(totals: Tensor, *, bits: bool) -> Tensor:
    """Return the accuracy, or the bits per target, of sums [..., 3] over samples."""
    return totals[..., 1] / totals[..., 2] / math.log(2) if bits else totals[..., 0] / totals[..., 2]


def loss(totals: Tensor) -> Tensor:
    """Return the mean loss in nats, of sums [..., 3] over samples."""
    return totals[..., 1] / totals[..., 2]


def quantized(trained: nn.Module, kind: str) -> nn.Module:
    """Return a copy of a trained model in a quantization; "": in float."""
    model = deepcopy(trained).eval()
    if kind:
        without_fake_quantizers(model, kind)
        quantize_linear(model, kind, plain=False)
    return model


@torch.no_grad()
def measure(model: nn.Module, task: Task) -> Row:
    """Measure the quality on the held-out data, and the size."""
    samples: list[tuple[int, float, int]] = []
    for batch in DataLoader(task.valid_set, task.batch, collate_fn=task.collate):
        output, targets = task.predict(model, batch), batch[-1]
        nats = F.cross_entropy(output.movedim(-1, 1), targets, reduction="none")  # 0 where a target is IGNORED
        each = (output.argmax(-1) == targets, nats, targets != IGNORED)
        samples += zip(*(values.reshape(len(targets), -1).sum(1).tolist() for values in each), strict=True)
    return Row(samples, len(save(*quantized_state(model))))


@torch.no_grad()
def milliseconds(model: nn.Module, task: Task, batch: Any) -> float:
    """Return the median of the processor times of a batch."""
    seconds = []
    for _ in range(CALLS):
        begin = time.process_time()
        task.predict(model, batch)
        seconds.append(time.process_time() - begin)
    return 1000 * statistics.median(seconds)


def kept(path: Path, find: Callable[[], Any]) -> Any:
    """Return what a file has, or find it and write it there."""
    if not path.exists():
        text = json.dumps(find())
        path.write_text(text, encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def table(name: str, task: Task, rows: dict[str, list[Row]], times: dict[str, list[float]]) -> str:
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
        totals = torch.stack([row.totals.sum(0) for row in found])
        mean = float(quality(totals, bits=task.bits).mean())
        shown = f"{mean:.4f}" if task.bits else f"{mean:.2%}".replace("%", " %")
        time_of_call = f"{statistics.median(times[label]):.1f}" if label in times else ""
        lines.append(f"| {label} | {shown} | {float(loss(totals).mean()):.4f} | {found[0].bytes:,} | {time_of_call} |")
    by_quality = partial(quality, bits=task.bits)
    for steps in ("", ", all steps"):
        chosen = [rows[f"{label}{steps}"] for label in ("student alone", "student distilled")] + [rows["original"]]
        for column, measured in (("quality", by_quality), ("loss", loss)):
            lines.append(f"\nDistilled{steps}, {column}: {recovered(chosen, measured, task.group)}")
    return "\n".join(lines)


def recovered(rows: list[list[Row]], measured: Callable[[Tensor], Tensor], group: int) -> str:
    """Return how far a distilled student is from the student alone (0) to the original (1), with a standard error.

    Args:
        rows: For each seed, of the student alone, of the distilled one, and of the original.
        measured: Returns a measure of sums over samples.
        group: Samples in a row that are resampled together.
    """
    totals = torch.stack([torch.stack([row.totals for row in each]) for each in rows])  # [3, seeds, samples, 3]
    seeds = measured(totals.sum(2))
    groups = torch.stack([part.sum(2) for part in totals.split(group, dim=2)], dim=2)
    draws = torch.randint(groups.shape[2], (RESAMPLES, groups.shape[2]), generator=torch.Generator().manual_seed(0))
    again = torch.stack([measured(groups[:, :, draw].sum(2)).mean(1) for draw in draws], dim=1)  # [3, resamples]
    alone, student, original = seeds.mean(1).tolist()
    gaps = f"alone {alone:.4f}, distilled {student:.4f}, original {original:.4f}"
    gap = again[2] - again[0]
    if abs(float(gap.mean())) <= 3 * float(gap.std()):
        return f"alone and original do not differ by three standard errors ({gaps})"
    mean = (student - alone) / (original - alone)
    error = float(((again[1] - again[0]) / gap).std())
    each = ", ".join(f"{float(value):.2f}" for value in (seeds[1] - seeds[0]) / (seeds[2] - seeds[0]))
    return f"{mean:.2f} of the way, standard error {error:.2f} (seeds: {each}; {gaps}; {groups.shape[2]} groups)"


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--recipes", nargs="+", choices=TASKS, default=list(TASKS))
    words.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    words.add_argument("--processes", type=int, default=2)
    words.add_argument("--folder", help="keep the runs there, and continue those that were stopped")
    words.add_argument("--no-times", action="store_true", help="train and measure the quality only")
    given = words.parse_args()
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        folder = given.folder or stack.enter_context(tempfile.TemporaryDirectory())
        for name in given.recipes:
            task, rows, times = TASKS[name](), dict[str, list[Row]](), dict[str, list[float]]()
            steps = 8 if given.quick else task.steps
            runs = [(seed, label) for seed in given.seeds for label in WAYS]
            for seed, label in runs:
                here, original = (f"{folder}/{name}-{seed}-{part}" for part in (label, "original"))
                settings = settings_of(task, label, seed, steps)
                train_here = partial(run_ranks, on_rank, given.processes, here, settings, name, label, original)
                for kind, row in kept(Path(here, MEASURED), partial(qualities, task, label, here, train_here)).items():
                    rows.setdefault(title(label, kind), []).append(Row(*row))
            batch = next(iter(DataLoader(task.valid_set, task.batch, collate_fn=task.collate)))
            for seed, label in () if given.no_times else runs:
                here = f"{folder}/{name}-{seed}-{label}"
                for kind, found in kept(Path(here, TIMES), partial(times_of, task, label, here, batch)).items():
                    times.setdefault(title(label, kind), []).append(found)
            print(table(name, task, rows, times), "\n", flush=True)
    print(line())


def settings_of(task: Task, label: str, seed: int, steps: int) -> Settings:
    """Return the settings of a run. All runs of a seed but that of the original have the same batches."""
    count = steps if WAYS[label].full else steps // 4
    settings = Settings(steps=count, batch=task.batch, seed=seed + (0 if label == "original" else 100))
    return replace(settings, checkpoint=CheckpointSettings(every=count))


def title(label: str, kind: str) -> str:
    """Return the name of a row of the table."""
    return f"{label}, {kind}" if kind and not WAYS[label].aware else label


def qualities(task: Task, label: str, folder: str, train_here: Callable[..., object]) -> dict[str, Row]:
    """Train a model, and measure it in float or in each quantization."""
    train_here(seconds=HOUR)
    trained = trained_model(task, WAYS[label], folder)
    return {kind: measure(quantized(trained, kind), task) for kind in WAYS[label].quantized}


def times_of(task: Task, label: str, folder: str, batch: Any) -> dict[str, float]:
    """Return the time of each quantization of a trained model."""
    trained = trained_model(task, WAYS[label], folder)
    return {kind: milliseconds(quantized(trained, kind), task, batch) for kind in WAYS[label].quantized}


def trained_model(task: Task, way: Way, folder: str) -> nn.Module:
    """Load what a run has trained."""
    return SavedWeights(folder).load(build(task, way, "")).eval()


if __name__ == "__main__":
    main()
