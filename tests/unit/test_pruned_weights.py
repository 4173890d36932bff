"""The rules of pruning on plain modules: the schedule, which weights are chosen, and wrong arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

from unisono.errors import LoopError
from unisono.pruning import MagnitudePruning, MovementPruning, SemiStructuredPruning
from unisono.pruning.selection import lowest, lowest_of_fours
from unisono.pruning.sparsity_schedule import SparsitySchedule


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 12), nn.LayerNorm(12), nn.Linear(12, 6))


def weight(model: nn.Module, layer: int) -> Any:
    """Return the weight of a layer. That of torch's pruning is no parameter."""
    return model.get_submodule(str(layer)).weight


# -- the schedule


def test_the_sparsity_is_cubic() -> None:
    schedule = SparsitySchedule(0.8, begin=10, end=50, every=10, initial=0.2)
    found = {t: s for t in range(100) if (s := schedule.at(t)) is not None}
    assert [*found] == [10, 20, 30, 40, 50]
    assert found[10] == pytest.approx(0.2)
    assert found[30] == pytest.approx(0.8 - 0.6 * 0.5**3)
    assert found[50] == 0.8


def test_the_last_pruning_is_at_the_end_of_an_uneven_schedule() -> None:
    schedule = SparsitySchedule(0.5, begin=2, end=9, every=3)
    assert [t for t in range(20) if schedule.at(t) is not None] == [2, 5, 8, 9]
    assert SparsitySchedule(0.5, 3, 3).at(3) == 0.5


# -- which weights


@pytest.mark.parametrize("count", range(9))
def test_equal_scores_are_taken_by_index(count: int) -> None:
    scores = torch.tensor([[2.0, 0.0, 1.0, 1.0], [1.0, 3.0, 0.0, 1.0]])
    order = [1, 6, 2, 3, 4, 7, 0, 5]
    found = lowest(scores, count)
    assert sorted(found.view(-1).nonzero().view(-1).tolist()) == sorted(order[:count])
    assert torch.equal(found, lowest(scores.t().contiguous().t(), count))


def test_nan_counts_as_infinity() -> None:
    scores = torch.tensor([torch.nan, torch.inf, 1.0, -torch.inf, torch.nan])
    assert lowest(scores, 3).tolist() == [True, False, True, True, False]
    assert lowest(scores, 4).tolist() == [True, True, True, True, False]


def test_two_of_each_four_are_taken() -> None:
    scores = torch.tensor([[4.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 1.0, 1.0, 9.0, 8.0, 7.0, 6.0]])
    expected = [[0, 1, 1, 0, 1, 1, 0, 0], [1, 0, 1, 0, 0, 0, 1, 1]]
    assert lowest_of_fours(scores, 2).int().tolist() == expected


def test_magnitude_pruning_agrees_with_torch() -> None:
    ours, theirs = chain(), chain()
    MagnitudePruning(ours, sparsity=0.4, begin=1, end=1).step()
    for layer in (theirs[0], theirs[2]):
        prune.l1_unstructured(layer, "weight", amount=0.4)
    assert torch.equal(weight(ours, 0), weight(theirs, 0))
    assert torch.equal(weight(ours, 2), weight(theirs, 2))

    ours, theirs = chain(), chain()
    pruning = MagnitudePruning(ours, sparsity=0.4, begin=1, end=1, scope="global")
    pruning.step()
    layers = [(theirs[0], "weight"), (theirs[2], "weight")]
    prune.global_unstructured(layers, pruning_method=prune.L1Unstructured, amount=0.4)
    assert torch.equal(weight(ours, 0), weight(theirs, 0))
    assert torch.equal(weight(ours, 2), weight(theirs, 2))
    assert sum(pruning.zeros.values()) == round(0.4 * (16 * 12 + 12 * 6))


def test_pruned_weights_stay_zero_with_momentum_and_weight_decay() -> None:
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9, weight_decay=0.1)
    pruning = MagnitudePruning(model, sparsity=0.6, begin=3, end=9, every=2, names=["0.*"])
    pruned = torch.zeros(12, 16, dtype=torch.bool)
    for number in range(15):
        model(torch.randn(4, 16)).square().sum().backward()
        optimizer.step()
        pruning.step()
        optimizer.zero_grad()
        zeros = weight(model, 0).eq(0)
        assert int(zeros.sum()) == pruning.zeros["0.weight"]
        assert not (pruned & ~zeros).any(), f"update {number} set a pruned weight"
        assert not weight(model, 0)[zeros].signbit().any()
        pruned = zeros
    assert int(pruned.sum()) == round(0.6 * 16 * 12)
    assert pruning.sparsity == round(0.6 * 16 * 12) / (16 * 12)
    assert weight(model, 2).ne(0).all()


def test_movement_pruning_is_the_straight_through_estimator() -> None:
    """Compare with masked weights in the forward pass: pruned weights keep their value and change their score."""
    plan: dict[str, Any] = {"sparsity": 0.5, "begin": 2, "end": 30, "every": 1, "initial": 0.3}
    torch.manual_seed(1)
    model = nn.Linear(8, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pruning = MovementPruning(model, optimizer, **plan)
    dense = model.weight.detach().clone().requires_grad_()
    scores, mask, schedule = torch.zeros(4, 8), torch.ones(4, 8), SparsitySchedule(0.5, 2, 30, 1, 0.3)
    returned = 0
    for number in range(1, 40):
        x, y = torch.randn(16, 8), torch.randn(16, 4)
        F.mse_loss(model(x), y, reduction="sum").backward()
        optimizer.step()
        pruning.step()
        optimizer.zero_grad()

        masked = (dense.detach() * mask).requires_grad_()
        F.mse_loss(F.linear(x, masked), y, reduction="sum").backward()
        assert masked.grad is not None
        scores -= dense.detach() * masked.grad
        dense.data -= 0.05 * masked.grad * mask
        before, sparsity = mask, schedule.at(number)
        if sparsity is not None:
            mask = torch.ones(32)
            mask[scores.view(-1).argsort(stable=True)[: round(sparsity * 32)]] = 0.0
            mask = mask.view(4, 8)
        returned += int((mask > before).sum())
        assert torch.equal(pruning.pruned["weight"], mask == 0)
        torch.testing.assert_close(model.weight.detach(), dense.detach() * mask)
    assert returned > 3
    assert int((model.weight == 0).sum()) == 16


# -- 2:4


def test_the_result_has_the_form_of_semi_structured_kernels() -> None:
    model = chain().half()
    SemiStructuredPruning(model, begin=1).step()
    sparse = weight(model, 0).detach()
    assert sparse.view(-1, 4).ne(0).sum(1).eq(2).all()
    big = sparse.repeat(8, 4)  # the sizes that the kernels take
    packed, indices = sparse_semi_structured_from_dense_cutlass(big)
    assert packed.numel() == big.numel() // 2
    assert torch.equal(sparse_semi_structured_to_dense_cutlass(packed, indices), big)


def test_torch_converts_no_weights_on_a_cpu() -> None:
    """docs/guide/pruning.md says so."""
    with pytest.raises(RuntimeError, match="Only CUDA tensors are currently supported"):
        torch.sparse.to_sparse_semi_structured(torch.eye(64).half())


# -- wrong arguments

Make = Callable[[nn.Module], Any]
PLAN: dict[str, Any] = {"sparsity": 0.5, "begin": 1, "end": 4}

WRONG: dict[str, tuple[Make, str]] = {
    "sparsity": (lambda m: MagnitudePruning(m, **{**PLAN, "sparsity": 80}), "sparsity=80 are fractions"),
    "initial": (lambda m: MagnitudePruning(m, **PLAN, initial=0.6), "initial=0.6 and sparsity=0.5"),
    "begin after end": (lambda m: MagnitudePruning(m, sparsity=0.5, begin=9, end=4), "begin=9, end=4 and every=1"),
    "begin 0": (lambda m: SemiStructuredPruning(m, begin=0), "begin=0, end=0"),
    "every": (lambda m: MagnitudePruning(m, **PLAN, every=0), "every=0"),
    "scope": (lambda m: MagnitudePruning(m, **PLAN, scope="layer"), "There is no scope 'layer'"),  # type: ignore[arg-type]
    "no match": (lambda m: MagnitudePruning(m, **PLAN, names=["head.*"]), "no parameter to prune that matches 'head"),
    "a norm": (lambda m: MagnitudePruning(m, **PLAN, names=["1.weight"]), "that matches '1.weight'"),
    "a text": (lambda m: MagnitudePruning(m, **PLAN, names="0.*"), r"pass a list: names=\['0.*'\]"),
    "frozen": (lambda m: MagnitudePruning(m.requires_grad_(False), **PLAN), "MagnitudePruning has nothing to prune"),
    "columns": (lambda m: SemiStructuredPruning(nn.Linear(6, 2), begin=1, names=["weight"]), r"shape is \(2, 6\)"),
    "none of four": (lambda m: SemiStructuredPruning(nn.Linear(6, 2), begin=1), "has nothing to prune"),
    "optimizer": (
        lambda m: MovementPruning(m, torch.optim.SGD(m.get_submodule("0").parameters(), 0.1), **PLAN),
        "1 of 2 are not in its groups; the first is 2.weight",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name: str) -> None:
    make, message = WRONG[name]
    with pytest.raises(LoopError, match=message.replace("(m", r"\(m")):
        make(chain())


def test_a_tied_parameter_counts_once_and_norms_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    assert [*MagnitudePruning(model, **PLAN).params] == ["0.weight"]
    assert [*SemiStructuredPruning(model, begin=1).params] == ["0.weight"]
