"""Loss spikes: a loss far above those before it is reported once; noise, a falling loss and NaN are not."""

from __future__ import annotations

import math
import random

from unisono.monitor.loss_spikes import WINDOW, LossSpikes


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


def test_noise_and_first_steps_are_no_spikes() -> None:
    dice = random.Random(1)
    assert spikes_of([10 / (1 + step) + dice.gauss(1, 0.2) for step in range(1000)]) == []
    assert spikes_of([8.0, 2.0, 30.0, 1.0]) == []
    assert spikes_of([2.0] * 50 + [math.inf, math.nan] + [2.0] * 50) == []
    assert spikes_of([-2.0] * 50 + [0.5]) == [50]
