"""Models of Hugging Face, built from a config: parallel layouts match one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.ranks.agreement import VOCABULARY, assert_agree
from tests.ranks.loops import attempt
from tests.ranks.test_outputs import Sentences, count_labels, pad
from tests.ranks.test_tensor_parallel import trained
from tests.ranks.training import settings
from tests.unit.test_shadow_partition import run_stages
from unisono.config import ParallelSettings
from unisono.distributed.process_group import to_local
from unisono.environment import World
from unisono.testing import run_promise, run_ranks
from unisono.train.run import Run

transformers = pytest.importorskip("transformers", reason="needs pip install 'unisono[huggingface]'")


def llama(*, tied: bool, layers: int = 4) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        use_cache=False,  # for parallel.activation_checkpoint
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def gpt2(*, tied: bool) -> nn.Module:
    """Build GPT-2 with its defaults: dropout and a cache of keys and values."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=4, n_head=2, tie_word_embeddings=tied
    )
    config.loss_type = "ForCausalLM"
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def nats(out: Any, batch: Any) -> Any:
    return out.loss * count_labels(batch), count_labels(batch)


def train_texts(run: Run[Any], build: Callable[[], nn.Module]) -> Any:
    """Train on sequences of several lengths with the model's own loss.

    Returns:
        Metrics per step, gradients of the first step by name, the promise, and the fingerprint.
    """
    model = run.place(build)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = torch.optim.swa_utils.AveragedModel(model)
    run.track(model=model, average=average, optimizer=optimizer)
    results: list[Any] = []
    gradients: dict[str, Any] = {}
    for step in run.steps(Sentences(21), collate_fn=pad):
        step.run(model, lambda out, batch: (out.loss, count_labels(batch)), mean=True)
        if not gradients:
            found = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
            gradients = {name: to_local(grad).numpy().copy() for name, grad in found}
        results += [step.loss, step.grad_norm]
        step.update(optimizer)
        average.update_parameters(model)
    for one in (model, average):
        results += run.evaluate(one, Sentences(9), nats, collate_fn=pad).values()
    results += run.predict(
        model, Sentences(5), forward=lambda m, b: m(**b).logits[:, 0].logsumexp(-1), collate_fn=pad
    ).tolist()
    batch = pad([Sentences(5)[i] for i in range(5)])
    with torch.no_grad():
        out = model.eval()(**batch, use_cache=False)
        results += [float(out.loss), float(out.logits.logsumexp(-1).sum())]
    return results, gradients, run_promise(run), run.context.state.fingerprint()


def llama_untied(run: Run[Any]) -> Any:
    return train_texts(run, lambda: llama(tied=False))


def llama_tied(run: Run[Any]) -> Any:
    return train_texts(run, lambda: llama(tied=True))


def gpt2_untied(run: Run[Any]) -> Any:
    return train_texts(run, lambda: gpt2(tied=False))


def gpt2_tied(run: Run[Any]) -> Any:
    return train_texts(run, lambda: gpt2(tied=True))


CONFIG = settings(batch=8, virtual_ranks=4, micro_batch=1, steps=3, clip=0.5)
"""Of 21 samples, the third step has five."""

Case = tuple[Callable[[Run[Any]], Any], dict[str, Any], dict[str, Any]]
"""A loop, settings of `parallel`, and other settings."""


def run_all(world: World, folder: Path, cases: list[Case]) -> list[Any]:
    """Run all cases in one process, because importing transformers takes seconds."""
    return [
        attempt(world, folder / str(i), loop, replace(CONFIG, **others, parallel=ParallelSettings(**axes)))
        for i, (loop, axes, others) in enumerate(cases)
    ]


def compare_ranks(size: int, folder: Path, *cases: Case) -> list[Any]:
    """Return metrics, gradients of all processes, promise and fingerprint for each case."""
    found = []
    for by_rank in zip(*run_ranks(run_all, size, folder, list(cases)), strict=True):
        assert all(isinstance(result, tuple) for result in by_rank), by_rank
        results, _, promise, fingerprint = by_rank[0]
        assert all((result[0], result[2], result[3]) == (results, promise, fingerprint) for result in by_rank)
        found.append(
            (results, {name: grad for result in by_rank for name, grad in result[1].items()}, promise, fingerprint)
        )
    return found


LOOPS = (llama_untied, gpt2_untied, llama_tied, gpt2_tied)
IN_BF16 = {"precision": "bf16"}


Reference = Callable[..., Any]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return the result of a loop on one process, computed once."""

    @cache
    def found(loop: Any, **others: Any) -> Any:
        return compare_ranks(1, tmp_path_factory.mktemp("alone"), (loop, {}, others))[0]

    return found


def assert_same_bits(result: Any, true: Any) -> None:
    assert (result[0], result[2][0], result[3]) == (true[0], true[2][0], true[3])
    assert result[1].keys() == true[1].keys()
    assert all(np.array_equal(result[1][name], true[1][name]) for name in result[1])


@pytest.mark.slow
@pytest.mark.parametrize("loop", [llama_untied, gpt2_untied])
def test_pipeline_is_bit_identical(tmp_path: Path, reference: Reference, loop: Any) -> None:
    cases = [
        {"schedule": "1F1B"},
        {"schedule": "Interleaved1F1B"},
        *([{"activation_checkpoint": "full"}] * (loop is llama_untied)),
    ]
    for result in compare_ranks(2, tmp_path, *((loop, {"pipeline": 2, **axes}, {}) for axes in cases)):
        assert_same_bits(result, reference(loop))


@pytest.mark.slow
def test_pipeline_is_bit_identical_in_bf16(tmp_path: Path, reference: Reference) -> None:
    assert_same_bits(
        compare_ranks(2, tmp_path, (llama_untied, {"pipeline": 2}, IN_BF16))[0], reference(llama_untied, **IN_BF16)
    )


def return_cache(run: Run[Any]) -> Any:
    model = run.place(lambda: gpt2(tied=False))
    return model(input_ids=torch.ones(2, 3, dtype=torch.long))


@pytest.mark.ci
def test_pipeline_output_has_no_cache(tmp_path: Path) -> None:
    for results in run_ranks(
        attempt, 2, tmp_path, return_cache, replace(CONFIG, parallel=ParallelSettings(pipeline=2))
    ):
        assert re.search(r"(?s)returned a DynamicCache.*use_cache", results), results


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"pipeline": 2, "schedule": "ZBVZeroBubble"}, {"pipeline": 4, "schedule": "GPipe"}])
def test_four_processes_match_one(tmp_path: Path, reference: Reference, axes: dict[str, Any]) -> None:
    for loop, result in zip(
        LOOPS[:2], compare_ranks(4, tmp_path, *((loop, axes, {}) for loop in LOOPS[:2])), strict=True
    ):
        assert_same_bits(result, reference(loop))


@pytest.mark.slow  # test_pipeline.py has weights that two stages share
@pytest.mark.parametrize("loop", [llama_tied, gpt2_tied])
def test_head_tied_to_the_embedding(tmp_path: Path, reference: Reference, loop: Any) -> None:
    """The weight is in the first and the last stage, so its gradient is summed in another order."""
    cases = [{"schedule": name} for name in ("1F1B", "Interleaved1F1B", "DualPipeV")]
    results, gradients, _, _ = reference(loop)
    for there, parts, promised, _ in compare_ranks(
        2, tmp_path, *((loop, {"pipeline": 2, **axes}, {}) for axes in cases)
    ):
        assert there == pytest.approx(results, rel=1e-6)
        assert parts.keys() == gradients.keys()
        for name, mine in parts.items():
            assert np.linalg.norm(mine - gradients[name]) <= 1e-5 * np.linalg.norm(gradients[name]), name
        assert re.search("several stages", promised[1])


SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "OPTForCausalLM": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "MixtralForCausalLM": {"num_local_experts": 4, "num_key_value_heads": 2},
    "BertForMaskedLM": {},
    "T5ForConditionalGeneration": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "decoder_start_token_id": 0},
}


@pytest.mark.parametrize("name", OTHERS)
def test_stages_match_the_whole_model(name: str) -> None:
    """Run the stages of several architectures in this process, one after the other."""
    kind = getattr(transformers, name)
    model = kind(kind.config_class(vocab_size=VOCABULARY, **SIZES, pad_token_id=0, **OTHERS[name]))
    batch: dict[str, Any] = pad([Sentences(3)[i] for i in range(3)])
    torch.manual_seed(3)
    expected = model(**batch)
    for stages in (2, 3):
        output, crossed = run_stages(model, stages, **batch)
        assert torch.equal(output.logits, expected.logits)
        assert torch.equal(output.loss, expected.loss)
        assert all(0 < len(tensors) <= 4 for tensors in crossed)


def logits() -> nn.Module:
    class Logits(transformers.LlamaForCausalLM):  # type: ignore[name-defined]
        """A model that returns only logits."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = super().forward(input_ids=tokens, use_cache=False).logits
            return out

    model: nn.Module = Logits(llama(tied=False, layers=2).config)
    return model


@pytest.mark.slow
def test_tensor_parallel_plan_of_the_model(tmp_path: Path) -> None:
    one = trained(1, tmp_path / "one", build=logits)
    assert_agree(trained(2, tmp_path / "tensor", build=logits, tensor=2), one)


@pytest.mark.slow
def test_shards_are_bit_identical(tmp_path: Path) -> None:
    one = trained(1, tmp_path / "one", build=logits)
    assert trained(2, tmp_path / "shard", build=logits, shard=2).fingerprint == one.fingerprint
