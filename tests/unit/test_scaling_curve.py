"""Scaling curves: speed-up, efficiency, and the parts of a step to which efficiency is lost."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.cli.scaling_curve.curve import PARTS, ScalePoint, ScalingCurve
from unisono.cli.scaling_curve.curve_report import CurveReport
from unisono.config import CommandLine


def record(samples: int = 8, **parts: float) -> dict[str, Any]:
    """Return what a process records of five equal steps, whose first two are not timed."""
    step = dict.fromkeys(("data", "forward", "backward", "exchange", "update", "other"), 0.0) | parts
    step["seconds"] = sum(step.values())
    slow = {name: 9 * value for name, value in step.items()}
    return {"steps": [slow, slow, step, step, step], "samples": samples}


ALONE = record(forward=2.0, backward=5.0, update=1.0)
FIRST = record(forward=1.0, backward=2.5, exchange=1.5, update=1.0)
SECOND = record(forward=1.5, backward=3.0, exchange=0.5, update=1.0)


def strong() -> ScalingCurve:
    return ScalingCurve("strong", [ScalePoint.of([[ALONE]]), ScalePoint.of([[FIRST, SECOND]])])


def test_warm_up_steps_do_not_count() -> None:
    assert strong().reference.seconds == 8.0
    assert strong().reference.rate == 1.0


def test_speed_up_and_efficiency() -> None:
    curve = strong()
    two = curve.points[1]
    assert two.seconds == 6.0
    assert curve.speed_up(two) == pytest.approx(8 / 6)
    assert curve.efficiency(two) == pytest.approx(8 / 12)


def test_the_parts_are_all_that_is_lost() -> None:
    """The first process computes 1 s less than the second one, and waits for it in the exchange."""
    curve = strong()
    two = curve.points[1]
    assert sum(two.parts.values()) == pytest.approx(2 * two.seconds)
    lost = curve.lost(two)
    assert list(lost) == sorted(PARTS, key=lambda name: -lost[name])
    assert sum(lost.values()) == pytest.approx(1 - curve.efficiency(two))
    assert {name: round(12 * share, 9) for name, share in lost.items()} == {
        "compute": 1.0,
        "uneven": 1.0,
        "exchange": 1.0,
        "update": 1.0,
        "data": 0.0,
        "other": 0.0,
    }


def test_weak_scaling_has_more_samples() -> None:
    """Two processes that take as long for twice the samples lose nothing."""
    curve = ScalingCurve("weak", [ScalePoint.of([[ALONE]]), ScalePoint.of([[{**ALONE, "samples": 16}] * 2])])
    two = curve.points[1]
    assert curve.speed_up(two) == 2.0
    assert curve.efficiency(two) == 1.0
    assert set(curve.lost(two).values()) == {0.0}
    assert curve.main_loss(two) is None


def test_medians_over_runs() -> None:
    slow = record(forward=20.0)
    assert ScalePoint.of([[ALONE], [slow], [ALONE]]).seconds == 8.0


def test_the_report_names_the_largest_loss() -> None:
    report = CurveReport("mine", [strong()], 1, 1, ["A note."], CommandLine(("unisono", "run", "mine.py")))
    text = "\n".join(report.lines())
    assert "Strong scaling: the same batch (8 samples a step)" in text
    assert "        2        6000       1.333      1.33         67%  " in text
    assert "compute 8%" in text
    assert "Strong: 2 processes lose most to " in text
    assert "2 processes of 1 thread share 1 core" in text
    assert text.endswith("A note.")
    assert report.as_json()["strong"][1]["speed_up"] == pytest.approx(8 / 6)
