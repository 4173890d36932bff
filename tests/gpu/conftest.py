"""Skip tests of GPUs where there are not enough of them.

With UNISONO_GPU=dry they run without a GPU, on the simulated accelerator (tests/standin), as far as it can stand in for
one. That finds mistakes in the tests before a GPU is there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.standin import standin

DRY = os.environ.get("UNISONO_GPU") == "dry"


class Gpu(NamedTuple):
    """The accelerator of this machine.

    device       the device of this process; in a dry run the CPU
    dry          whether there is none, and the tests are only tried
    environment  variables for processes that compute on it
    """

    device: torch.device
    dry: bool
    environment: Mapping[str, str]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip those for which there are too few GPUs."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        needed = max((mark.args[0] for mark in item.iter_markers("gpus")), default=1)
        if count < needed and not (DRY and needed == 1):
            item.add_marker(
                pytest.mark.skip(f"needs {needed} CUDA device{'s' * (needed > 1)}; this machine has {count}")
            )


@pytest.fixture
def gpu(accelerator: str) -> Gpu:
    """Return the accelerator of this machine."""
    if torch.cuda.is_available():
        return Gpu(torch.device("cuda", 0), False, {})
    return Gpu(torch.device("cpu"), True, standin.environment(accelerator))


@pytest.fixture
def only_cuda(gpu: Gpu) -> None:
    """Skip a test that the simulated accelerator cannot run."""
    if gpu.dry:
        pytest.skip("the simulated accelerator cannot run this test")
