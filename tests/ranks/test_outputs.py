"""Batches and outputs of every shape through step.run and run.evaluate: dicts, nests, models that own their loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks.loops import SETTINGS, Numbers, attempt
from unisono.testing import run_ranks
from unisono.train.run import Run

CONFIG = replace(SETTINGS, steps=10, batch=8, virtual_ranks=4)
VOCABULARY = 19


class Pairs(Numbers):
    """A nested sample: two views, and a dict of labels."""

    def __getitem__(self, i: int) -> Any:
        x, _ = super().__getitem__(i)
        return (x, x + 0.1 * torch.randn(3)), {"colour": i % 2, "weight": x.sum()}


class TwoHeads(nn.Module):
    """Several outputs, as a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 8)
        self.colour = nn.Linear(8, 2)
        self.weight = nn.Linear(8, 1)

    def forward(self, views: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        x = torch.relu(self.body(views[0]) + self.body(views[1]))
        return {"colour": self.colour(x), "weight": self.weight(x).squeeze(1)}


def two_losses(out: dict[str, torch.Tensor], views: Any, labels: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    loss = F.cross_entropy(out["colour"], labels["colour"], reduction="sum")
    return loss + (out["weight"] - labels["weight"]).square().sum(), len(labels["colour"])


def right(out: dict[str, torch.Tensor], views: Any, labels: dict[str, torch.Tensor]) -> dict[str, Any]:
    n = len(labels["colour"])
    return {
        "right": ((out["colour"].argmax(1) == labels["colour"]).sum(), n),
        "off": ((out["weight"] - labels["weight"]).abs().sum(), n),
    }


def nested(run: Run[Any]) -> Any:
    model = run.place(TwoHeads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    losses = []
    for step in run.steps(Pairs(21)):
        step.run(model, two_losses)
        step.update(optimizer)
        losses.append(step.loss)
    rows = run.predict(model, Pairs(21))
    return losses, run.evaluate(model, Pairs(21), right), rows["weight"].tolist(), run.context.state.fingerprint()


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Tokens as Hugging Face's models take them; of every sentence the first few labels do not count."""

    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        length = 4 + i % 5
        tokens = (torch.arange(length) * (i + 1)) % VOCABULARY
        return {"input_ids": tokens, "labels": torch.where(torch.arange(length) < i % 3, -100, tokens)}


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    tokens, labels = (
        nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)
        for name, value in (("input_ids", 0), ("labels", -100))
    )
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row["labels"]) for row in rows], batch_first=True)
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def counted(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """How many labels a causal model's own loss is a mean over: it predicts all but the first."""
    return (batch["labels"][:, 1:] != -100).sum()


def small_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    config.loss_type = "ForCausalLM"
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def hugging_face(run: Run[Any]) -> Any:
    """A model from a config, which owns its loss: a mean over the labels that count."""
    model = run.place(small_gpt2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    losses = []
    for step in run.steps(Sentences(21), collate_fn=padded):
        step.run(model, lambda out, batch: (out.loss, counted(batch)), mean=True)
        step.update(optimizer, clip=1.0)
        losses.append(step.loss)
    loss = run.evaluate(
        model, Sentences(21), lambda out, batch: (out.loss * counted(batch), counted(batch)), collate_fn=padded
    )
    best = run.predict(model, Sentences(21), forward=lambda m, b: m(**b).logits[:, 0].argmax(-1), collate_fn=padded)
    return losses, loss, best.tolist(), run.context.state.fingerprint()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nested_batches_and_several_outputs(tmp_path: Path, precision: str) -> None:
    same(tmp_path, nested, precision)


@pytest.mark.slow  # loading transformers; test_hugging_face_models.py has quick ones
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_hugging_face_model_that_owns_its_loss(tmp_path: Path, precision: str) -> None:
    pytest.importorskip("transformers", reason="needs pip install 'unisono[huggingface]'")
    same(tmp_path, hugging_face, precision)


def same(tmp_path: Path, loop: Any, precision: Any) -> None:
    config = replace(CONFIG, precision=precision)
    first, *others = [told for n in (1, 2, 3) for told in run_ranks(attempt, n, tmp_path / str(n), loop, config)]
    assert isinstance(first, tuple), first
    assert all(told == first for told in others)
    assert first[0][-1] < first[0][0]


def whole_batch(run: Run[Any]) -> Any:
    """Our mean over four virtual ranks, and the model's own over the whole batch: the same, though lengths differ."""
    torch.manual_seed(0)
    model = run.place(lambda: small_gpt2().eval())  # no dropout
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    everything = padded([Sentences()[i] for i in range(20)])
    model(**everything).loss.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    model.zero_grad()
    for step in run.steps(Sentences(20), collate_fn=padded):
        step.run(model, lambda out, batch: (out.loss, counted(batch)), mean=True)
        apart = {
            name: float((p.grad - want[name]).norm() / want[name].norm().clamp(min=1e-3))
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        step.update(optimizer)
    return max(apart.values())


def test_its_mean_is_over_all_labels_that_count(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs pip install 'unisono[huggingface]'")
    config = replace(CONFIG, batch=20, steps=1)
    for apart in run_ranks(attempt, 2, tmp_path, whole_batch, config):
        assert apart < 1e-5
