"""Emergency dumps: a dump is read once, by the same rank, and a partial one is never read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from unisono.checkpoint import emergency_dump


def test_a_dump_is_read_once(tmp_path: Path) -> None:
    tensors, plain = {"bag": torch.arange(7, dtype=torch.uint8), "empty": torch.empty(0, dtype=torch.uint8)}, [{"a": 1}]
    emergency_dump.write(tmp_path, 2, 41, {"bag": torch.zeros(1)}, [])
    emergency_dump.write(tmp_path, 2, 43, tensors, plain)
    assert emergency_dump.dumped_steps(tmp_path) == 43
    assert emergency_dump.read_dump(tmp_path, 1) is None
    found = emergency_dump.read_dump(tmp_path, 2)
    assert found is not None
    assert found[1] == plain
    assert {name: tensor.tolist() for name, tensor in found[0].items()} == {"bag": [*range(7)], "empty": []}
    assert emergency_dump.read_dump(tmp_path, 2) is None
    assert not (tmp_path / emergency_dump.FOLDER).exists()


def test_a_partial_dump_is_ignored(tmp_path: Path) -> None:
    emergency_dump.write(tmp_path, 0, 3, {"bag": torch.zeros(1)}, [])
    (path,) = (tmp_path / emergency_dump.FOLDER).iterdir()
    path.rename(path.with_suffix(".half"))
    assert emergency_dump.dumped_steps(tmp_path) == 0
    assert emergency_dump.read_dump(tmp_path, 0) is None
    emergency_dump.clear(tmp_path)
    assert not (tmp_path / emergency_dump.FOLDER).exists()


CREATE_AND_REMOVE = """
import os, sys
while True:
    os.mkdir(sys.argv[1])
    os.rmdir(sys.argv[1])
"""


def test_reading_while_another_process_removes_the_folder(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", CREATE_AND_REMOVE, str(tmp_path / emergency_dump.FOLDER)]) as other:
        try:
            for _ in range(5000):
                assert emergency_dump.read_dump(tmp_path, 1) is None
                assert emergency_dump.dumped_steps(tmp_path) == 0
        finally:
            other.kill()
