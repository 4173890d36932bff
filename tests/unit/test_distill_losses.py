"""Losses of distillation: against torch's own functions, and against sums by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from unisono.distill import RecordedOutputs, continue_sequences, hidden_state_loss, relation_loss, soft_target_loss
from unisono.errors import LoopError


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_soft_targets_are_the_divergence_times_the_squared_temperature() -> None:
    ours, theirs = random(4, 5, 7).requires_grad_(), random(4, 5, 7, seed=1)
    expected = F.kl_div(F.log_softmax(ours / 3, -1), F.log_softmax(theirs / 3, -1), reduction="sum", log_target=True)
    torch.testing.assert_close(soft_target_loss(ours, theirs, temperature=3.0), 9 * expected)
    assert soft_target_loss(theirs, theirs).item() == pytest.approx(0, abs=1e-5)


def test_a_high_temperature_compares_logits() -> None:
    """The limit in section 2.1 of the paper: the gradient is (z - v) / classes for logits with mean 0."""
    ours, theirs = (random(3, 6, seed=seed) for seed in (2, 3))
    ours, theirs = (each - each.mean(-1, keepdim=True) for each in (ours, theirs))
    ours.requires_grad_()
    soft_target_loss(ours, theirs, temperature=1000.0).backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, (ours - theirs).detach() / 6, rtol=0.01, atol=0.01)


def test_soft_targets_of_the_largest_logits() -> None:
    ours, theirs = random(2, 9), random(2, 9, seed=1)
    values, indices = theirs.topk(9)
    torch.testing.assert_close(soft_target_loss(ours, values, indices=indices), soft_target_loss(ours, theirs))
    values, indices = theirs.topk(2)
    expected = (values / 2).softmax(-1)
    found = F.log_softmax(ours / 2, -1).gather(-1, indices)
    by_hand = 4 * (expected * (expected.log() - found)).sum()
    torch.testing.assert_close(soft_target_loss(ours, values, indices=indices), by_hand)


@pytest.mark.parametrize("loss", [soft_target_loss, hidden_state_loss])
def test_a_mask_leaves_rows_out(loss) -> None:  # type: ignore[no-untyped-def]
    ours, theirs, mask = random(3, 4, 6), random(3, 4, 6, seed=1), torch.tensor([[1.0, 1, 1, 0]] * 3)
    torch.testing.assert_close(loss(ours, theirs, mask=mask), loss(ours[:, :3], theirs[:, :3]))


def test_hidden_states_are_compared_row_by_row() -> None:
    ours, theirs = random(3, 4, 6), random(3, 4, 6, seed=1)
    torch.testing.assert_close(hidden_state_loss(ours, theirs), F.mse_loss(ours, theirs) * 12)


@pytest.mark.parametrize("causal", [False, True])
def test_relations_of_queries_and_keys_are_the_attention(causal: bool) -> None:
    """The attention of torch, from its values: with the identity as values it returns the distributions."""
    sides = [(random(2, 5, 12, seed=seed), random(2, 5, 12, seed=seed + 1)) for seed in (0, 2)]
    weights = []
    for queries, keys in sides:
        q, k = (each.unflatten(-1, (3, 4)).transpose(1, 2) for each in (queries, keys))
        weights.append(F.scaled_dot_product_attention(q, k, torch.eye(5).expand(2, 3, 5, 5), is_causal=causal))
    ours, theirs = weights
    terms = torch.where(theirs > 0, theirs * (theirs / ours).log(), 0.0)
    expected = terms.sum(-1).mean(1).sum()
    torch.testing.assert_close(relation_loss(*sides, heads=3, causal=causal), expected)


def test_relations_of_models_of_different_width() -> None:
    ours, theirs = random(2, 6, 8).requires_grad_(), random(2, 6, 24, seed=1)
    loss = relation_loss(ours, theirs, heads=4, causal=True)
    loss.backward()
    assert loss.item() > 0
    assert ours.grad is not None
    assert bool(ours.grad.isfinite().all())
    assert relation_loss(theirs, theirs, heads=4).item() == pytest.approx(0, abs=1e-5)
    with pytest.raises(ValueError, match="8 channels cannot be divided into 3 slices"):
        relation_loss(ours, theirs, heads=3)


def test_padding_does_not_change_a_relation() -> None:
    ours, theirs = random(2, 6, 8), random(2, 6, 8, seed=1)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]] * 2)
    padded = relation_loss(ours, theirs, heads=2, mask=mask)
    torch.testing.assert_close(padded, relation_loss(ours[:, :4], theirs[:, :4], heads=2))


def test_outputs_of_inner_modules_are_taken_once() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    recorded = RecordedOutputs(model, ["1"])
    with pytest.raises(LoopError, match="no output of '1'"):
        recorded.take("1")
    model(torch.ones(1, 3))
    hidden = recorded.take("1")
    torch.testing.assert_close(hidden, model[:2](torch.ones(1, 3)))
    recorded.take("1")
    with pytest.raises(LoopError, match="Recorded now: nothing"):
        recorded.take("1")
    with pytest.raises(LoopError, match=r"has no module 'blocks\.1'") as caught:
        RecordedOutputs(model, ["blocks.1"])
    assert "some are 1" in str(caught.value)


class Counting(nn.Module):
    """The most likely token after n is n + 1, if the model sees at most three tokens."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert tokens.shape[1] <= 3
        return 20.0 * F.one_hot((tokens + 1) % 10, 10).float()


def test_sequences_are_continued() -> None:
    prompts = torch.tensor([[1, 2], [7, 8]])
    expected = [[1, 2, 3, 4, 5], [7, 8, 9, 0, 1]]
    assert continue_sequences(Counting(), prompts, 3, context=3).tolist() == expected
    assert continue_sequences(Counting(), prompts, 3, context=3, temperature=1.0).tolist() == expected
    torch.manual_seed(0)
    sampled = continue_sequences(Counting(), prompts.expand(2, 2), 3, context=3, temperature=1000.0)
    assert sampled.tolist() != expected
    assert math.prod(sampled.shape) == 10
