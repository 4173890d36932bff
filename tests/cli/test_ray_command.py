"""Wrong requests to `unisono ray` that need no cluster. tests/clusters/test_ray.py has one."""

from __future__ import annotations

import sys

import pytest

from tests.cli.refused_requests import RequestProblems
from unisono.clusters.ray import ray_room
from unisono.errors import Problem


def test_ray_that_is_not_installed_is_named(request_problems: RequestProblems, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_room, "find_spec", lambda name: None)
    fact = f"{sys.executable} finds no module ray."
    do = "pip install 'unisono[ray]', on all nodes"
    assert request_problems("ray", "train.py", "--ranks", "2") == [Problem("Ray is not installed.", fact, do)]


@pytest.mark.parametrize(
    ("flags", "error", "do"),
    [
        ("--strategy SPRAED", "Invalid value for --strategy: SPRAED", "--strategy PACK"),
        ("--cpus-per-rank 1.5", "--cpus-per-rank 1.5 is out of range.", "--cpus-per-rank 1"),
        ("--gpus-per-rank -1", "--gpus-per-rank -1 is out of range.", "--gpus-per-rank 1"),
        ("--cpus-per-rank 0", "--cpus-per-rank is 0.", "--cpus-per-rank 1"),
        ("--wait -1", "--wait -1 is out of range.", "--wait 60"),
    ],
)
def test_wrong_flags_are_named(request_problems: RequestProblems, flags: str, error: str, do: str) -> None:
    (problem,) = request_problems("ray", "train.py", "--ranks", "2", *flags.split())
    assert problem.error == error
    assert do in problem.remedy
