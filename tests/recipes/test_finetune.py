"""Train the recipe finetune with small settings, and with its defaults."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs pip install 'unisono[hf]'")
pytest.importorskip("peft", reason="needs pip install 'unisono[adapters]'")

import transformers

from tests.recipes.training import (
    assert_same_run,
    resume_on_three_processes,
    run_recipe,
    train_on_one_process,
    train_recipe,
)
from unisono.recipes import finetune

TOY = {"steps": 6, "batch": 10, "base_steps": 4, "length": 96, "valid_documents": 20, "lora.dropout": 0.1}

train = partial(train_recipe, "finetune", sets=TOY)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train on one process, and return the contents of result.json."""
    return train_on_one_process("finetune", tmp_path_factory.mktemp("reference") / "run", sets=TOY)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_and_a_resume_on_three_match_one(tmp_path: Path, reference: dict[str, Any]) -> None:
    result, screen = train(tmp_path / "run", 2)
    assert "% filled" in screen
    assert f"validation: {result['bits_per_token']:.3f} bits per token" in screen
    assert_same_run(result, reference, "bits_per_token", "base_bits_per_token")
    resumed = resume_on_three_processes("finetune", tmp_path / "resumed", TOY)
    assert_same_run(resumed, reference, "bits_per_token")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft calls the older name
def test_quality_of_the_defaults(tmp_path: Path) -> None:
    """The adapter must be far better than the base model, and peft loads it."""
    result, _ = train_recipe("finetune", tmp_path / "run", 2, sets={})
    assert result["bits_per_token"] < 0.9 * result["base_bits_per_token"]
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "base")
    import peft

    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "adapter")
    names = [name for name, p in adapted.named_parameters() if "lora_B" in name and bool(p.any())]
    assert len(names) == 14


@pytest.mark.ci
def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    done = run_recipe("finetune", tmp_path / "run", 1, sets={**TOY, "base": tmp_path / "nothing"})
    assert done.returncode == 2, done.stdout
    assert f"There is no model in base={tmp_path}/nothing." in done.stdout + done.stderr
    assert "hf download NAME --local-dir" in done.stdout + done.stderr


def documents() -> list[finetune.Document]:
    """Return documents of several lengths, with prompts."""
    generator = torch.Generator().manual_seed(1)
    sizes = [7, 3, 12, 5, 9, 2, 16, 4]
    return [(torch.randint(3, 40, (n,), generator=generator).tolist(), n // 3) for n in sizes]


def small() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, num_attention_heads=4, **sizes)).eval()


def test_packed_documents_have_the_loss_of_single_ones() -> None:
    """No token attends to another document, and positions restart."""
    settings, model = finetune.Settings(length=16), small()
    rows = finetune.pack(documents(), settings)
    assert len(rows) < len(documents())
    assert sorted(len(ids) for row in rows for ids, _ in row) == sorted(len(ids) for ids, _ in documents())
    assert all(sum(len(ids) for ids, _ in row) <= 16 for row in rows)
    packed = finetune.as_batch(rows, 16, 0)
    loss, count = finetune.loss_sum(finetune.logits(model, packed), packed)
    loss = loss.detach()
    single = [finetune.as_batch([[document]], len(document[0]), 0) for document in documents()]
    found = [finetune.loss_sum(finetune.logits(model, batch), batch) for batch in single]
    assert int(count) == sum(int(weight) for _, weight in found) > 0
    assert float(loss) == pytest.approx(sum(float(each.detach()) for each, _ in found), rel=1e-6)


def test_a_token_of_one_document_does_not_change_another() -> None:
    settings, model = finetune.Settings(length=16), small()
    rows = finetune.pack(documents()[:3], settings)
    batch = finetune.as_batch(rows, 16, 0)
    before = finetune.logits(model, batch)
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, 0] = 39 - changed["input_ids"][0, 0]
    after = finetune.logits(model, changed)
    first = len(rows[0][0][0])
    assert not torch.equal(before[0, :first], after[0, :first])
    assert torch.equal(before[0, first:], after[0, first:])
    assert torch.equal(before[1:], after[1:])
