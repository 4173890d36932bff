"""Tensors in memory-mapped files: the same bits, little resident memory, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.cli.command import ROOT
from unisono.tensors.mapped_memory import LARGE, MappedMemory, scratch_folder

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system has no posix_fallocate")

SIDE = 300  # SIDE * SIDE float32 values are more than LARGE bytes


class Odd(nn.Module):
    """A model whose constructor uses its tensors in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.small = nn.Linear(SIDE, SIDE), nn.Linear(2, 2)
        self.tied = nn.Linear(SIDE, SIDE)
        self.tied.weight = self.first.weight
        values = torch.empty(SIDE, SIDE)
        self.late = nn.Parameter(values)  # shares the memory of a tensor that is filled later
        values.normal_()
        flat = torch.randn(2 * SIDE * SIDE)
        self.upper = nn.Parameter(flat[: SIDE * SIDE].view(SIDE, SIDE))
        self.lower = nn.Parameter(flat[SIDE * SIDE :].view(SIDE, SIDE))
        flat.mul_(3)
        self.turned = nn.Parameter(torch.rand(SIDE, SIDE).t())
        self.halves = nn.Parameter(torch.randn(SIDE, 2 * SIDE).to(torch.bfloat16))
        self.register_buffer("mask", torch.tril(torch.ones(SIDE, SIDE, dtype=torch.float64)))
        nn.init.orthogonal_(self.first.weight)
        self.scale = float(self.first.weight.detach().std())
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(SIDE, SIDE))
        self.after = torch.rand(3)


def build(memory: MappedMemory | None) -> tuple[Odd, torch.Tensor]:
    """Return a model, and the state of the generator after its constructor."""
    torch.manual_seed(7)
    if memory is None:
        return Odd(), torch.get_rng_state()
    with memory.allocating():
        return Odd(), torch.get_rng_state()


def assert_equal(model: Odd, like: Odd) -> None:
    state = model.state_dict()
    assert list(state) == list(like.state_dict())
    for name, value in like.state_dict().items():
        assert torch.equal(state[name], value), name
        assert state[name].stride() == value.stride(), name
        assert state[name].dtype == value.dtype, name
    assert model.scale == like.scale
    assert torch.equal(model.after, like.after)
    assert model.tied.weight is model.first.weight
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, p in like.named_parameters() if p.requires_grad
    }


class Aliases(nn.Module):
    """A model whose attributes share memory with its buffers and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(SIDE, SIDE))
        table: Any = self.table
        self.row, self.storage = table[0], table.untyped_storage()
        self.array = np.zeros((2 * SIDE, SIDE), np.float32)
        self.register_buffer("upper", torch.from_numpy(self.array[:SIDE]))
        self.register_buffer("whole", torch.from_numpy(self.array))
        self.register_buffer("sparse", torch.eye(SIDE).to_sparse())
        self.register_buffer("conjugate", torch.fft.fft(torch.randn(SIDE, SIDE)).conj())
        self.weight = nn.Parameter(torch.randn(SIDE, SIDE))
        self.view = self.weight.detach()[1]
        with torch.inference_mode():
            self.register_buffer("fixed", torch.ones(SIDE, SIDE))


def test_aliases_and_odd_tensors_stay_as_they_are() -> None:
    memory = MappedMemory()
    torch.manual_seed(5)
    with memory.allocating():
        model: Any = Aliases()
    torch.manual_seed(5)
    like: Any = Aliases()
    memory.move_in(model.parameters())
    memory.release_pages()
    assert memory.holds(model.table)
    memory.move_out([*model.parameters(), *model.buffers()])
    assert not memory.holds(model.table)
    for name in ("table", "upper", "whole", "conjugate", "weight", "fixed"):
        assert torch.equal(getattr(model, name), getattr(like, name)), name
    model.table.add_(1)
    model.weight.data.mul_(2)
    model.array += 3
    assert float(model.row.sum()) == SIDE
    assert model.storage.data_ptr() == model.table.data_ptr()
    assert torch.equal(model.view, model.weight.detach()[1])
    assert float(model.upper.sum()) == 3 * SIDE * SIDE
    assert float(model.whole.sum()) == 6 * SIDE * SIDE
    assert model.fixed.is_inference()


def test_memory_that_torch_fills_is_filled() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with MappedMemory().allocating():
            found = torch.empty(SIDE, SIDE)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.isnan().all()


def test_a_model_in_files_has_the_same_bits() -> None:
    (whole, state), memory = build(None), MappedMemory()
    model, same_state = build(memory)
    assert torch.equal(state, same_state)
    memory.release_pages()
    assert_equal(model, whole)
    large = [p for p in model.parameters() if p.untyped_storage().nbytes() >= LARGE]
    assert len(large) > 5
    assert all(map(memory.holds, large))
    assert not memory.holds(model.small.weight)
    assert all(p.data_ptr() % 64 == 0 for p in large if p is not model.lower)


def test_tensors_that_are_moved_to_memory_stay_the_same_objects() -> None:
    (whole, _), memory = build(None), MappedMemory()
    model, _ = build(memory)
    files = open_files()
    params = dict(model.named_parameters())
    memory.move_out([*model.parameters(), *model.buffers()])
    assert_equal(model, whole)
    assert all(p is params[name] for name, p in model.named_parameters())
    assert not any(map(memory.holds, [*model.parameters(), *model.buffers()]))
    assert model.upper.untyped_storage().data_ptr() == model.lower.untyped_storage().data_ptr()
    assert open_files() < files


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


PEAK = """
import torch
from benchmarks.memory import kilobytes, reset_peak
from unisono.tensors.mapped_memory import MappedMemory
memory = MappedMemory()
with memory.allocating():
    torch.nn.Linear(512, 512)  # loads what the first operators need
before = reset_peak()
with memory.allocating():
    layers = [torch.nn.Linear(2048, 2048) for _ in range(24)]
print((kilobytes("VmHWM") - before) // 1024)
memory.release_pages()
assert all(float(layer.weight.detach().abs().sum()) > 0 for layer in layers)
"""


def in_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.ci
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system does not report peak memory")
def test_a_model_in_files_needs_little_resident_memory() -> None:
    assert int(in_process(PEAK)) < 96  # 384 MB of weights in layers of 16 MB


@pytest.mark.ci
def test_a_full_disk_leaves_tensors_in_ordinary_memory() -> None:
    """A limit on the size of files is what a process can set for itself; fallocate fails as on a full disk."""
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))"
    found = in_process(f"""
{code}
import torch
from unisono.tensors.mapped_memory import MappedMemory
memory = MappedMemory()
with memory.allocating():
    torch.manual_seed(1)
    one = torch.randn(2**20)
torch.manual_seed(1)
print(memory.is_full, memory.holds(one), torch.equal(one, torch.randn(2**20)))
""")
    assert found.split() == ["True", "False", "True"]


def test_the_folder_is_on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = Path("/proc/mounts").read_text(encoding="utf-8") if Path("/proc/mounts").exists() else ""
    if " /dev/shm tmpfs " not in mounts:
        pytest.skip("this system has no tmpfs at /dev/shm")
    monkeypatch.setattr("tempfile.tempdir", "/dev/shm")
    assert scratch_folder() == Path("/var/tmp")


def test_weights_that_a_library_has_mapped_are_moved_into_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    torch.manual_seed(3)
    weights = {name: torch.randn(SIDE, SIDE) for name in ("a", "b")}
    save_file(weights, tmp_path / "weights.safetensors")
    found, memory = load_file(tmp_path / "weights.safetensors"), MappedMemory()
    params = [nn.Parameter(found["a"]), nn.Parameter(found["b"]), nn.Parameter(torch.ones(2))]
    memory.move_in([*params, params[0]])
    assert [memory.holds(p) for p in params] == [True, True, False]
    memory.move_out(params)
    assert torch.equal(params[0], weights["a"])
    assert torch.equal(params[1], weights["b"])


@pytest.mark.ci
def test_what_a_forked_process_writes_stays_there() -> None:
    """Attributes that are no parameters stay in the files; a loader's worker is forked with them."""
    found = in_process("""
import os
import torch
from unisono.tensors.mapped_memory import MappedMemory
torch.set_num_threads(1)  # threads of OpenMP do not exist in a forked process
memory = MappedMemory()
with memory.allocating():
    table, weight = torch.ones(2**20), torch.nn.Parameter(torch.ones(2**20))
memory.move_out([weight])
child = os.fork()
if not child:
    table.zero_()
    weight.data.zero_()
    os._exit(0)
os.waitpid(child, 0)
table[:5] = 2
print(float(table.sum()), float(weight.sum().detach()), table.data_ptr() % 64)
""")
    assert found.split() == [f"{2**20 + 5}.0", f"{2**20}.0", "0"]


def test_tensors_in_memory_of_their_own_kind_stay_there(tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.write_bytes(bytes(2**20))
    memory = MappedMemory()
    with memory.allocating():
        mapped = torch.from_file(str(path), shared=True, size=2**18)
        viewed = torch.arange(360000.0).reshape(600, 600).t().contiguous().view(-1)
    mapped.fill_(1)
    assert path.read_bytes()[:4] == torch.ones(1).numpy().tobytes()
    assert memory.holds(viewed)
    assert float(viewed[1]) == 600.0


def test_only_operators_of_torch_are_replaced() -> None:
    """A functional collective returns a tensor before it is written; torch finds its work by the tensor."""
    kept = torch.ones(SIDE, SIDE)

    @torch.library.custom_op("unisono_test::kept", mutates_args=())
    def same(x: torch.Tensor) -> torch.Tensor:
        return kept

    memory = MappedMemory()
    with memory.allocating():
        found = same(torch.ones(2))
        chosen = torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (torch.ones(SIDE, SIDE),))
    assert found.data_ptr() == kept.data_ptr()
    assert float(chosen[0, 0]) == 2
