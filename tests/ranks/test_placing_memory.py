"""The memory of placing a divided model: a process's part and the largest layer, with the weights of one process."""

from __future__ import annotations

import gc
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.memory import kilobytes, reset_peak
from benchmarks.placing import Net, loss_of
from unisono.config import CheckpointSettings, ParallelSettings, Settings
from unisono.distributed.init import join_process_group
from unisono.environment import World
from unisono.testing import build_run, close_run, finish_run, run_ranks, run_result

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports a process's peak memory")

LAYERS, WIDTH = 24, 512
LAYER = 8 * WIDTH**2 * 4 // 2**20
PLACEMENTS: dict[str, Any] = {
    "shard": {"shard": 2},
    "step": {"shard": 2, "reshard": "step"},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
}


def settings(parallel: dict[str, Any], steps: int) -> Settings:
    return Settings(
        steps=steps,
        batch=4,
        virtual_ranks=2,
        parallel=ParallelSettings(**parallel),
        checkpoint=CheckpointSettings(async_save=False),
    )


def build(like: str) -> nn.Module:
    return Net(LAYERS, WIDTH) if like == "plain" else PretrainedNet(like)


class PretrainedNet(nn.Module):
    """A model of Hugging Face in the place of `Net`, from a config or with weights of a folder."""

    def __init__(self, source: str, model: nn.Module | None = None) -> None:
        import transformers

        super().__init__()
        self.model: Any = model
        if source == "config":
            self.model = transformers.LlamaForCausalLM(llama_config())
        elif model is None:
            self.model = transformers.LlamaForCausalLM.from_pretrained(source)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x[:, :8].long()
        out: torch.Tensor = self.model(ids).logits
        return out


def llama_config() -> Any:
    import transformers

    return transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=4096,
        tie_word_embeddings=True,
        use_cache=False,
    )


def place(
    world: World, parallel: dict[str, Any], folder: Path, source: str = "plain", in_parts: bool = False
) -> tuple[float, str]:
    """Return the increase of this process's peak memory in MB, and the fingerprint of the model."""
    build("plain" if source == "plain" else "config")  # loads what models and their first operators need
    gc.collect()
    with join_process_group(world) as group:
        run = build_run(settings(parallel, 1), world, group, folder)
        before = reset_peak()
        if in_parts:
            from unisono.integrations.transformers import PretrainedWeights

            model = PretrainedWeights(source).place(run, wrap=partial(PretrainedNet, source))
        else:
            model = run.place(partial(build, source))
        peak = (kilobytes("VmHWM") - before) / 1024
        run.track(model=model)
        found = run.context.state.fingerprint()
        close_run(run)
    return peak, found


@pytest.mark.ci
@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_process_holds_its_part_and_a_layer_while_placing(name: str, tmp_path: Path) -> None:
    ranks = run_ranks(place, 2, PLACEMENTS[name], tmp_path / "2")
    ((_, alone),) = run_ranks(place, 1, {}, tmp_path / "1")
    assert_small(ranks, LAYERS * LAYER)
    assert {found for _, found in ranks} == {alone}


def assert_small(ranks: list[tuple[float, str]], whole: float) -> None:
    for peak, _ in ranks:
        assert peak < whole / 2 + LAYER + 64, f"{peak:.0f} MB for half of {whole:.0f} MB"


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("source", ["config", "folder", "parts"])
def test_a_model_of_hugging_face(name: str, source: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs pip install 'unisono[huggingface]'")
    model = transformers.LlamaForCausalLM(llama_config())
    whole = sum(p.nbytes for p in model.parameters()) / 2**20
    in_parts = source == "parts"
    if source != "config":
        model.save_pretrained(tmp_path / "weights", max_shard_size="30MB")
        source = str(tmp_path / "weights")
    del model
    ranks = run_ranks(place, 2, PLACEMENTS[name], tmp_path / "2", source, in_parts)
    ((_, alone),) = run_ranks(place, 1, {}, tmp_path / "1", source)
    assert {found for _, found in ranks} == {alone}
    assert_small(ranks, whole)


def resume(world: World, parallel: dict[str, Any], folder: Path, first: bool) -> tuple[float, str]:
    """Train one step and save, or resume. Return the increase of the peak memory, and the fingerprint after a step."""
    with join_process_group(world) as group:
        run = build_run(settings(parallel, 1 if first else 2), world, group, folder, resume=not first)
        gc.collect()
        before = reset_peak()
        model = run.place(lambda: Net(LAYERS, WIDTH))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run.track(model=model, optimizer=optimizer)
        peak = (kilobytes("VmHWM") - before) / 1024
        for step in run.steps(TensorDataset(torch.ones(4, WIDTH))):
            step.run(model, loss_of)
            step.update(optimizer)
        finish_run(run)
        found = str(run_result(run)["weights_sha256"])
        close_run(run)
    return peak, found


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", ["shard", *(pytest.param(name, marks=pytest.mark.slow) for name in PLACEMENTS if name != "shard")]
)
def test_a_resume_reads_one_tensor_at_a_time(name: str, tmp_path: Path) -> None:
    run_ranks(resume, 2, PLACEMENTS[name], tmp_path, True)
    assert_small(run_ranks(resume, 2, PLACEMENTS[name], tmp_path, False), LAYERS * LAYER)


class Unusual(nn.Module):
    """Buffers that are sparse, or have an alias that forward uses; a constructor that resizes a tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(300, 300), nn.Linear(300, 300)
        self.register_buffer("table", torch.zeros(300, 300))
        table: Any = self.table
        if kind == "sparse":
            self.register_buffer("sparse", torch.eye(300).to_sparse().coalesce())
        elif kind == "resized":
            self.register_buffer("grown", torch.zeros(300, 300).resize_(600, 300).fill_(0.5))
        elif kind == "conjugate":
            self.register_buffer("turned", torch.randn(300, 300, dtype=torch.complex64).conj())
        self.row = table[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.relu(self.first(x))) * (1 + self.row)
        return out


def train_unusual(world: World, kind: str, parallel: dict[str, Any], folder: Path) -> str:
    with join_process_group(world) as group:
        run = build_run(settings(parallel, 3), world, group, folder)
        model: Any = run.place(lambda: Unusual(kind))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(TensorDataset(torch.ones(4, 300))):
            step.run(model, loss_of)
            step.update(optimizer)
            model.table.add_(1)
        finish_run(run)
        found = str(run_result(run)["weights_sha256"])
        close_run(run)
    return found


def place_sparse(world: World, folder: Path) -> int:
    with join_process_group(world) as group:
        run = build_run(settings({}, 1), world, group, folder)
        model: Any = run.place(lambda: Unusual("sparse"))
        close_run(run)
    return int(model.sparse.values().numel())


def test_a_sparse_buffer_is_placed(tmp_path: Path) -> None:
    """Steps with several virtual ranks do not support it: torch does not compare sparse tensors."""
    assert run_ranks(place_sparse, 1, tmp_path) == [300]


@pytest.mark.parametrize("kind", ["alias", "resized", "conjugate"])
def test_unusual_buffers_have_the_bits_of_one_process(kind: str, tmp_path: Path) -> None:
    (one,) = run_ranks(train_unusual, 1, kind, {}, tmp_path / "1")
    assert set(run_ranks(train_unusual, 2, kind, {"shard": 2}, tmp_path / "2")) == {one}
