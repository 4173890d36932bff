"""Loss spikes: a loss far above those before it is reported once; noise, a falling loss and NaN are not."""

from __future__ import annotations

import io
import math
import random
from dataclasses import dataclass
from pathlib import Path

from unisono.monitor.loss_spikes import WINDOW, LossSpikes
from unisono.monitor.step_monitor import NOTED_SPIKES, StepMonitor


@dataclass
class FinishedStep:
    number: int
    loss: float
    weight: float = 1.0
    samples: int = 1
    grad_norm: float | None = None


def spikes_of(losses: list[float]) -> list[int]:
    spikes = LossSpikes()
    return [step for step, loss in enumerate(losses) if spikes.observe(loss) is not None]


def test_a_spike_is_reported_once() -> None:
    smooth = [2.0 + 0.01 * math.sin(step) for step in range(400)]
    assert spikes_of(smooth) == []
    spiky = list(smooth)
    spiky[100:103] = [9.0, 8.0, 5.0]
    spiky[100 + 2 * WINDOW] = 4.0
    assert spikes_of(spiky) == [100, 100 + 2 * WINDOW]


def test_only_the_first_spikes_are_printed(tmp_path: Path) -> None:
    output, places = io.StringIO(), range(100, 600, 100)
    monitor = StepMonitor(tmp_path, 0, output, live=False, columns=80, color=False)
    monitor.begin(600, 0, 0, resumed=False, learning_rate=lambda: None)
    for number in range(600):
        monitor.step(FinishedStep(number, 9.0 if number in places else 2.0 + 0.01 * math.sin(number)))
    monitor.close()
    printed = [line for line in output.getvalue().splitlines() if "spike" in line or line.startswith("The loss of")]
    assert [line.split(" is ")[0] for line in printed[:3]] == [f"The loss of step {n}" for n in places[:NOTED_SPIKES]]
    assert printed[3:] == ["Later spikes of the loss are only in the report."]
    assert monitor.timeline_path.read_text().count('"spike"') == len(places)


def test_noise_and_first_steps_are_no_spikes() -> None:
    dice = random.Random(1)
    assert spikes_of([10 / (1 + step) + dice.gauss(1, 0.2) for step in range(1000)]) == []
    assert spikes_of([8.0, 2.0, 30.0, 1.0]) == []
    assert spikes_of([2.0] * 50 + [math.inf, math.nan] + [2.0] * 50) == []
    assert spikes_of([-2.0] * 50 + [0.5]) == [50]
