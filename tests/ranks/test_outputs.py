"""Batches and outputs of step.run and run.evaluate: dicts, nested structures, models that return their loss."""

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
    """Nested samples: two views, and a dict of labels."""

    def __getitem__(self, i: int) -> Any:
        x, _ = super().__getitem__(i)
        return (x, x + 0.1 * torch.randn(3)), {"colour": i % 2, "weight": x.sum()}


class TwoHeads(nn.Module):
    """A model that returns a dict."""

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


def accuracy(out: dict[str, torch.Tensor], views: Any, labels: dict[str, torch.Tensor]) -> dict[str, Any]:
    n = len(labels["colour"])
    return {
        "right": ((out["colour"].argmax(1) == labels["colour"]).sum(), n),
        "off": ((out["weight"] - labels["weight"]).abs().sum(), n),
    }


def train_nested(run: Run[Any]) -> Any:
    model = run.place(TwoHeads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    losses = []
    for step in run.steps(Pairs(21)):
        step.run(model, two_losses)
        step.update(optimizer)
        losses.append(step.loss)
    rows = run.predict(model, Pairs(21))
    return losses, run.evaluate(model, Pairs(21), accuracy), rows["weight"].tolist(), run.context.state.fingerprint()


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Inputs of Hugging Face models. The first labels of each sequence are ignored."""

    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        length = 4 + i % 5
        tokens = (torch.arange(length) * (i + 1)) % VOCABULARY
        return {"input_ids": tokens, "labels": torch.where(torch.arange(length) < i % 3, -100, tokens)}


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    tokens, labels = (
        nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)
        for name, value in (("input_ids", 0), ("labels", -100))
    )
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row["labels"]) for row in rows], batch_first=True)
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def count_labels(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the number of labels that a causal model's loss averages over: all but the first."""
    return (batch["labels"][:, 1:] != -100).sum()


def small_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    config.loss_type = "ForCausalLM"
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def train_hugging_face(run: Run[Any]) -> Any:
    """Train a model whose loss is a mean over the labels that are not ignored."""
    model = run.place(small_gpt2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    losses = []
    for step in run.steps(Sentences(21), collate_fn=pad):
        step.run(model, lambda out, batch: (out.loss, count_labels(batch)), mean=True)
        step.update(optimizer, clip=1.0)
        losses.append(step.loss)
    loss = run.evaluate(
        model, Sentences(21), lambda out, batch: (out.loss * count_labels(batch), count_labels(batch)), collate_fn=pad
    )
    best = run.predict(model, Sentences(21), forward=lambda m, b: m(**b).logits[:, 0].argmax(-1), collate_fn=pad)
    return losses, loss, best.tolist(), run.context.state.fingerprint()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nested_batches_and_several_outputs(tmp_path: Path, precision: str) -> None:
    assert_same_on_two(tmp_path, train_nested, precision)


@pytest.mark.slow  # loading transformers; test_hugging_face_models.py has quick ones
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_hugging_face_model_with_its_own_loss(tmp_path: Path, precision: str) -> None:
    pytest.importorskip("transformers", reason="needs pip install 'unisono[huggingface]'")
    assert_same_on_two(tmp_path, train_hugging_face, precision)


def assert_same_on_two(tmp_path: Path, loop: Any, precision: Any) -> None:
    config = replace(CONFIG, precision=precision)
    first, *others = [results for n in (1, 2, 3) for results in run_ranks(attempt, n, tmp_path / str(n), loop, config)]
    assert isinstance(first, tuple), first
    assert all(results == first for results in others)
    assert first[0][-1] < first[0][0]


def whole_batch(run: Run[Any]) -> Any:
    """Compare the gradient over four virtual ranks with that of the whole batch, for sequences of several lengths."""
    torch.manual_seed(0)
    model = run.place(lambda: small_gpt2().eval())  # no dropout
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    everything = pad([Sentences()[i] for i in range(20)])
    model(**everything).loss.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    model.zero_grad()
    for step in run.steps(Sentences(20), collate_fn=pad):
        step.run(model, lambda out, batch: (out.loss, count_labels(batch)), mean=True)
        apart = {
            name: float((p.grad - want[name]).norm() / want[name].norm().clamp(min=1e-3))
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        step.update(optimizer)
    return max(apart.values())


@pytest.mark.ci
def test_mean_is_over_all_labels_of_the_batch(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs pip install 'unisono[huggingface]'")
    config = replace(CONFIG, batch=20, steps=1)
    for apart in run_ranks(attempt, 2, tmp_path, whole_batch, config):
        assert apart < 1e-5
