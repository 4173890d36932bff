"""Adapters of peft: the same bits on any number of processes, in shards, after a resume and after a death."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.loops import attempt
from unisono.checkpoint.load import load, newest
from unisono.checkpoint.sharded_state import gather_tensor
from unisono.config import ParallelSettings, Settings
from unisono.environment import World
from unisono.testing import run_promise, run_ranks, run_result
from unisono.train.run import Run

transformers = pytest.importorskip("transformers", reason="needs pip install 'unisono[huggingface]'")
pytest.importorskip("peft", reason="needs pip install 'unisono[adapters]'")

CONFIG = Settings(steps=4, batch=16, virtual_ranks=8, seed=3)
SHARDED = replace(CONFIG, parallel=ParallelSettings(shard=2))
BY_STEP = replace(CONFIG, parallel=ParallelSettings(shard=2, reshard="step"))
ADAPTER = 2 * 2 * (4 * 16 + 16 * 4)
"""Parameters of the adapter: two matrices in each of two blocks, with rank 4 and width 16."""

LLAMA = transformers.LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=16,
    use_cache=False,
)


def adapted(*, dropout: float = 0.1, targets: Sequence[str] = ("q_proj", "v_proj"), quantized: str = "") -> nn.Module:
    """Return a small Llama with LoRA in two matrices of each block."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=dropout, target_modules=list(targets))
    base = transformers.LlamaForCausalLM(LLAMA)
    if quantized:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(base.model.layers, Int8WeightOnlyConfig())
    model: nn.Module = get_peft_model(base, lora)
    if quantized == "unwrapped":
        from torchao.utils import unwrap_tensor_subclass

        unwrap_tensor_subclass(model)
    return model


def sentences() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.randint(0, 32, (64, 10), generator=torch.Generator().manual_seed(1)))


def train(run: Run[Any], **options: Any) -> dict[str, Any]:
    """Train the adapter, and return what the run has found and sent."""
    model = run.place(lambda: adapted(**options))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    run.track(model=model, optimizer=optimizer)
    norms = []
    for step in run.steps(sentences()):
        step.run(
            model,
            lambda out, x: (out.loss, x[:, 1:].numel()),
            forward=lambda module, batch: module(input_ids=batch[0], labels=batch[0]),
            mean=True,
        )
        norms.append(step.grad_norm)
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        step.update(optimizer)
    assert len(optimizer.state) == len(trained)
    return {
        "norms": norms,
        "adapter": [gathered(p) for p in trained],
        "weights": run.context.state.fingerprint(),
        "loss": run_result(run)["loss"],
        "promise": run_promise(run)[0],
        "bytes": run_result(run).get("bytes_per_step", 0),
    }


def gathered(p: torch.Tensor) -> list[float]:
    whole: torch.Tensor = gather_tensor(p.detach())
    return whole.flatten().tolist()


def trained_on(world: World, folder: str, config: Settings, resume: bool = False, **options: Any) -> Any:
    return attempt(world, Path(folder), partial(train, **options), config, resume=resume)


def same(found: Any, reference: Any) -> bool:
    """Compare everything but the bytes that were sent."""
    assert isinstance(found, dict), found
    return {**found, "bytes": 0} == {**reference, "bytes": 0}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result of one process."""
    (found,) = run_ranks(trained_on, 1, str(tmp_path_factory.mktemp("one")), CONFIG)
    assert isinstance(found, dict), found
    assert found["promise"] == "exact"
    return found


@pytest.mark.ci
@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)])
def test_any_number_of_processes(tmp_path: Path, reference: dict[str, Any], size: int) -> None:
    for found in run_ranks(trained_on, size, str(tmp_path), CONFIG):
        assert same(found, reference)
        assert 0 < found["bytes"] < 4 * 4 * ADAPTER, "frozen weights, of 12 times that size, are exchanged"


@pytest.mark.ci
@pytest.mark.parametrize("config", [SHARDED, BY_STEP], ids=["layer", "step"])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_shards(tmp_path: Path, reference: dict[str, Any], size: int, config: Settings) -> None:
    for found in run_ranks(trained_on, size, str(tmp_path), config):
        assert same(found, reference)


@pytest.mark.slow
def test_a_resume_on_another_number_of_processes(tmp_path: Path, reference: dict[str, Any]) -> None:
    for before, size, after in ((CONFIG, 3, CONFIG), (SHARDED, 1, CONFIG), (CONFIG, 2, SHARDED)):
        folder = str(tmp_path / f"{size}-{after.parallel.shard}")
        run_ranks(trained_on, 2, folder, replace(before, steps=2))
        for found in run_ranks(trained_on, size, folder, after, True):
            assert same(found, {**reference, "norms": reference["norms"][2:]})


@pytest.mark.slow
def test_dropout_of_the_adapter_changes_the_result(tmp_path: Path, reference: dict[str, Any]) -> None:
    found, other = (
        run_ranks(partial(trained_on, dropout=0.0), size, str(tmp_path / str(size)), CONFIG)[0] for size in (1, 2)
    )
    assert same(found, other)
    assert found["weights"] != reference["weights"]


@pytest.mark.ci
def test_what_a_checkpoint_holds(tmp_path: Path) -> None:
    """It holds all weights of the model, and moments of the adapter's parameters only."""
    run_ranks(trained_on, 2, str(tmp_path), CONFIG)
    saved = load(newest(tmp_path, print) or tmp_path).states
    frozen = [name for name in saved["model"] if "lora_" not in name]
    assert len(frozen) == len(transformers.LlamaForCausalLM(LLAMA).state_dict())
    assert sum(state["exp_avg"].numel() for state in saved["optimizer"]["state"].values()) == ADAPTER


EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_divided_matrices_with_adapters(tmp_path: Path, size: int) -> None:
    """The adapters of matrices that are divided by columns and by rows agree with those of one process."""
    train_all = partial(trained_on, dropout=0.0, targets=EVERY)
    (one,) = run_ranks(train_all, 1, str(tmp_path / "1"), CONFIG)
    divided = replace(CONFIG, parallel=ParallelSettings(tensor=2))
    results = run_ranks(train_all, size, str(tmp_path / "2"), divided)
    for found in results:
        assert isinstance(found, dict), found
        assert found["weights"] == results[0]["weights"]
        assert found["norms"] == pytest.approx(one["norms"], rel=1e-4)
        for mine, theirs in zip(found["adapter"], one["adapter"], strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_quantized_base(tmp_path: Path, reference: dict[str, Any]) -> None:
    pytest.importorskip("torchao", reason="needs pip install torchao")
    train_it = partial(trained_on, quantized="unwrapped")
    (one,) = run_ranks(train_it, 1, str(tmp_path / "1"), CONFIG)
    assert one["promise"] == "exact"
    assert one["weights"] != reference["weights"]
    run_ranks(train_it, 2, str(tmp_path / "2"), replace(CONFIG, steps=2))
    for found in run_ranks(train_it, 3, str(tmp_path / "2"), CONFIG, True):
        assert same(found, {**one, "norms": one["norms"][2:]})
    for found in run_ranks(train_it, 5, str(tmp_path / "5"), CONFIG):
        assert same(found, one)
    (found,) = run_ranks(partial(trained_on, quantized="wrapped"), 1, str(tmp_path / "wrapped"), CONFIG)
    assert "with parameters that consist of several tensors" in found
    assert "unwrap_tensor_subclass" in found


@pytest.mark.slow
def test_a_quantized_base_in_shards(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="needs pip install torchao")
    train_it = partial(trained_on, quantized="unwrapped")
    (one,) = run_ranks(train_it, 1, str(tmp_path / "1"), CONFIG)
    for size, config in ((2, SHARDED), (4, SHARDED), (2, BY_STEP)):
        folder = str(tmp_path / f"{size} {config.parallel.reshard}")
        for found in run_ranks(train_it, size, folder, config):
            assert same(found, one)
    run_ranks(train_it, 2, str(tmp_path / "half"), replace(SHARDED, steps=2))
    for found in run_ranks(train_it, 3, str(tmp_path / "half"), CONFIG, True):
        assert same(found, {**one, "norms": one["norms"][2:]})
    casting = replace(CONFIG, precision="bf16", parallel=ParallelSettings(shard=2, param_dtype="bf16"))
    for found in run_ranks(train_it, 2, str(tmp_path / "cast"), casting):
        assert "its parameters have several dtypes" in found
        assert "FSDP2 casts the parameters of a layer as one tensor" in found
