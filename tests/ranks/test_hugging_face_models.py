"""Models of Hugging Face, made from a config: under every placement they train as in one process."""

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

from tests.ranks.agreement import VOCABULARY, agree
from tests.ranks.loops import attempt
from tests.ranks.test_outputs import Sentences, counted, padded
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
    """With dropout and a cache for keys and values, as it is by default."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=4, n_head=2, tie_word_embeddings=tied
    )
    config.loss_type = "ForCausalLM"
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def nats(out: Any, batch: Any) -> Any:
    return out.loss * counted(batch), counted(batch)


def learn(run: Run[Any], build: Callable[[], nn.Module]) -> Any:
    """Lines of varied length, a loss of the model's own: what is told by step, the first step's gradients by name, the
    promise, the fingerprint."""
    model = run.place(build)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = torch.optim.swa_utils.AveragedModel(model)
    run.track(model=model, average=average, optimizer=optimizer)
    told: list[Any] = []
    gradients: dict[str, Any] = {}
    for step in run.steps(Sentences(21), collate_fn=padded):
        step.run(model, lambda out, batch: (out.loss, counted(batch)), mean=True)
        if not gradients:
            found = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
            gradients = {name: to_local(grad).numpy().copy() for name, grad in found}
        told += [step.loss, step.grad_norm]
        step.update(optimizer)
        average.update_parameters(model)
    for one in (model, average):
        told += run.evaluate(one, Sentences(9), nats, collate_fn=padded).values()
    told += run.predict(
        model, Sentences(5), forward=lambda m, b: m(**b).logits[:, 0].logsumexp(-1), collate_fn=padded
    ).tolist()
    batch = padded([Sentences(5)[i] for i in range(5)])
    with torch.no_grad():
        out = model.eval()(**batch, use_cache=False)
        told += [float(out.loss), float(out.logits.logsumexp(-1).sum())]
    return told, gradients, run_promise(run), run.context.state.fingerprint()


def llama_untied(run: Run[Any]) -> Any:
    return learn(run, lambda: llama(tied=False))


def llama_tied(run: Run[Any]) -> Any:
    return learn(run, lambda: llama(tied=True))


def gpt2_untied(run: Run[Any]) -> Any:
    return learn(run, lambda: gpt2(tied=False))


def gpt2_tied(run: Run[Any]) -> Any:
    return learn(run, lambda: gpt2(tied=True))


CONFIG = settings(batch=8, virtual_ranks=4, micro_batch=1, steps=3, clip=0.5)
"""Over 21 lines: the third step has five of them."""

Way = tuple[Callable[[Run[Any]], Any], dict[str, Any], dict[str, Any]]
"""A loop, settings of `parallel`, and others."""


def one_after_the_other(world: World, folder: Path, ways: list[Way]) -> list[Any]:
    """They share the seconds in which transformers is imported."""
    return [
        attempt(world, folder / str(i), loop, replace(CONFIG, **others, parallel=ParallelSettings(**axes)))
        for i, (loop, axes, others) in enumerate(ways)
    ]


def come_of(size: int, folder: Path, *ways: Way) -> list[Any]:
    """Of each way what all processes were told, every gradient that one of them has, the promise, the fingerprint."""
    found = []
    for everybody in zip(*run_ranks(one_after_the_other, size, folder, list(ways)), strict=True):
        assert all(isinstance(came, tuple) for came in everybody), everybody
        told, _, promise, fingerprint = everybody[0]
        assert all((came[0], came[2], came[3]) == (told, promise, fingerprint) for came in everybody)
        found.append((told, {name: grad for came in everybody for name, grad in came[1].items()}, promise, fingerprint))
    return found


LOOPS = (llama_untied, gpt2_untied, llama_tied, gpt2_tied)
IN_BF16 = {"precision": "bf16"}


Alone = Callable[..., Any]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """What one process makes of a loop."""

    @cache
    def found(loop: Any, **others: Any) -> Any:
        return come_of(1, tmp_path_factory.mktemp("alone"), (loop, {}, others))[0]

    return found


def same_bits(came: Any, true: Any) -> None:
    assert (came[0], came[2][0], came[3]) == (true[0], true[2][0], true[3])
    assert came[1].keys() == true[1].keys()
    assert all(np.array_equal(came[1][name], true[1][name]) for name in came[1])


@pytest.mark.slow
@pytest.mark.parametrize("loop", [llama_untied, gpt2_untied])
def test_a_pipeline_has_the_bits_of_one_process(tmp_path: Path, alone: Alone, loop: Any) -> None:
    ways = [
        {"schedule": "1F1B"},
        {"schedule": "Interleaved1F1B"},
        *([{"activation_checkpoint": "full"}] * (loop is llama_untied)),
    ]
    for came in come_of(2, tmp_path, *((loop, {"pipeline": 2, **axes}, {}) for axes in ways)):
        same_bits(came, alone(loop))


@pytest.mark.slow
def test_that_holds_in_bf16_too(tmp_path: Path, alone: Alone) -> None:
    same_bits(come_of(2, tmp_path, (llama_untied, {"pipeline": 2}, IN_BF16))[0], alone(llama_untied, **IN_BF16))


def caching(run: Run[Any]) -> Any:
    model = run.place(lambda: gpt2(tied=False))
    return model(input_ids=torch.ones(2, 3, dtype=torch.long))


def test_a_cache_is_given_back_to_nobody(tmp_path: Path) -> None:
    for told in run_ranks(attempt, 2, tmp_path, caching, replace(CONFIG, parallel=ParallelSettings(pipeline=2))):
        assert re.search(r"(?s)returned a DynamicCache.*use_cache", told), told


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"pipeline": 2, "schedule": "ZBVZeroBubble"}, {"pipeline": 4, "schedule": "GPipe"}])
def test_four_processes(tmp_path: Path, alone: Alone, axes: dict[str, Any]) -> None:
    for loop, came in zip(LOOPS[:2], come_of(4, tmp_path, *((loop, axes, {}) for loop in LOOPS[:2])), strict=True):
        same_bits(came, alone(loop))


@pytest.mark.slow  # test_pipeline.py has weights that two stages share
@pytest.mark.parametrize("loop", [llama_tied, gpt2_tied])
def test_a_head_that_is_tied_to_the_embedding(tmp_path: Path, alone: Alone, loop: Any) -> None:
    """It is in the first and in the last stage: the sum of its gradients is another, in its last bits."""
    ways = [{"schedule": name} for name in ("1F1B", "Interleaved1F1B", "DualPipeV")]
    told, gradients, _, _ = alone(loop)
    for there, parts, promised, _ in come_of(2, tmp_path, *((loop, {"pipeline": 2, **axes}, {}) for axes in ways)):
        assert there == pytest.approx(told, rel=1e-6)
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
def test_stages_of_others_have_their_bits(name: str) -> None:
    """Experts, an encoder with its decoder, a last norm that stands before the layers: stage after stage, in here."""
    kind = getattr(transformers, name)
    model = kind(kind.config_class(vocab_size=VOCABULARY, **SIZES, pad_token_id=0, **OTHERS[name]))
    batch: dict[str, Any] = padded([Sentences(3)[i] for i in range(3)])
    torch.manual_seed(3)
    expected = model(**batch)
    for stages in (2, 3):
        output, crossed = run_stages(model, stages, **batch)
        assert torch.equal(output.logits, expected.logits)
        assert torch.equal(output.loss, expected.loss)
        assert all(0 < len(tensors) <= 4 for tensors in crossed)


def logits() -> nn.Module:
    class Logits(transformers.LlamaForCausalLM):  # type: ignore[name-defined]
        """Its output is what the loss takes."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = super().forward(input_ids=tokens, use_cache=False).logits
            return out

    model: nn.Module = Logits(llama(tied=False, layers=2).config)
    return model


def test_a_model_brings_its_own_plan(tmp_path: Path) -> None:
    one = trained(1, tmp_path / "one", build=logits)
    agree(trained(2, tmp_path / "tensor", build=logits, tensor=2), one)


@pytest.mark.slow
def test_shards_have_the_bits_of_one_process(tmp_path: Path) -> None:
    one = trained(1, tmp_path / "one", build=logits)
    assert trained(2, tmp_path / "shard", build=logits, shard=2).fingerprint == one.fingerprint
