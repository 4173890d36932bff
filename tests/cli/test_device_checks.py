"""A request that this machine cannot meet is refused before any process starts."""

from __future__ import annotations

import pytest
import torch

from tests.cli.refused_requests import RequestProblems
from tests.cli.refused_requests import request_problems as request_problems

only_cpu = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has more than a CPU")


@only_cpu
@pytest.mark.parametrize("way", ["model_parallel_devices", "data_parallel_devices"])
def test_several_devices_per_process_are_refused(request_problems: RequestProblems, way: str) -> None:
    (problem,) = request_problems("run", "train.py", "--set", f"parallel.{way}=2")
    assert problem.error == f"parallel.{way} = 2"
    assert "This machine has 0 accelerators" in problem.facts
    assert f"unisono run train.py --set parallel.{way}=1" in problem.remedy
    assert "--ranks 2" in problem.remedy
