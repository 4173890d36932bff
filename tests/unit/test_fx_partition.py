"""Traced partitions: the pieces of a model, run one after the other, have the result of the model."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.ranks.training import MLP, TinyGPT
from unisono.errors import LoopError
from unisono.parallel.pipeline_parallel.fx_partition import CannotTrace, FxPartition, compute
from unisono.parallel.pipeline_parallel.partition import LocalStages, StageInput
from unisono.recipes.text import GPT, Model


class Skips(nn.Module):
    """A skip connection from the first module to the last; positions from the input's length; a module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 6)
        self.rows = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.slope = nn.Parameter(torch.ones(6))
        self.leave = nn.Linear(6, 2)

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        first = h = self.enter(x) * self.slope
        for row in self.rows:
            h = row(h).relu() + torch.arange(x.shape[1])[:, None]
        h = self.rows[0](h)
        out: Tensor = self.leave(h + first) * scale
        return out


class WithoutGradients(nn.Sequential):
    """Compute without gradients between two modules, which cannot be traced."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        with torch.no_grad():
            x = x + 1
        out: Tensor = self[1](x)
        return out


def random_tokens(vocabulary: int, length: int) -> Tensor:
    return torch.randint(0, vocabulary, (3, length))


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("length", [5, 16])
@pytest.mark.parametrize("name", ["GPT", "TinyGPT", "MLP", "Skips"])
def test_the_pieces_are_the_model(name: str, length: int, stages: int) -> None:
    torch.manual_seed(0)
    models: dict[str, nn.Module] = {
        "GPT": GPT(Model(width=16, depth=4, heads=2, context=16)),
        "TinyGPT": TinyGPT(),
        "MLP": MLP(),
        "Skips": Skips(),
    }
    model = models[name].eval()
    x = {"GPT": random_tokens(256, length), "TinyGPT": random_tokens(23, length), "MLP": torch.randn(length, 12)}.get(
        name, torch.randn(2, length, 4)
    )
    partition = FxPartition(model)
    if name == "MLP" and stages == 3:
        with pytest.raises(LoopError, match="of which 2 have parameters"):
            partition.stage_starts(stages, [])
        return
    pieces, received = partition.split(partition.stage_starts(stages, [])), list[Tensor]()
    for piece in pieces:
        output, received = compute(model, piece, partition.bind((x,), {}), received)
    assert torch.equal(output, model(x))


def test_stages_are_balanced_and_send_one_tensor() -> None:
    """The embedding costs nothing, and stages send the activations, not two terms of a sum."""
    partition = FxPartition(GPT(Model(width=64, depth=6, heads=2, context=16)))
    for stages, names in {2: ["blocks.3"], 3: ["blocks.2", "blocks.4"]}.items():
        starts = partition.stage_starts(stages, [])
        assert [partition.links[first].name for first in starts[1:]] == names
        assert all(len(piece.receives) == 1 for piece in partition.split(starts)[1:])
    assert partition.stage_starts(2, ["norm"]) == [0, 7]


def test_an_argument_with_a_default_must_keep_it() -> None:
    partition = FxPartition(Skips())
    assert list(partition.bind((1,), {"scale": 2.0})) == ["x", "scale"]
    with pytest.raises(LoopError, match="called with scale"):
        partition.bind((1,), {"scale": 3.0})


def test_a_forward_that_turns_gradients_off_is_not_traced() -> None:
    with pytest.raises(CannotTrace, match=r"torch\.no_grad"):
        FxPartition(WithoutGradients())


class DecidesInPython(nn.Module):
    """Let Python decide something between modules."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.share = what, 0.5
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        match self.what:
            case "mode":
                x = nn.functional.dropout(x, 0.5, self.training)
            case "gradients":
                x = x * 2 if torch.is_grad_enabled() else x
            case "torch":
                x = x + torch.randn(3)
            case "numpy":
                x = x + float(np.random.rand())
            case "random":
                x = x if random.random() < 0.5 else -x
            case "attribute":
                x = x * self.share
        out: Tensor = self.second(x)
        return out


@pytest.mark.parametrize("what", ["mode", "gradients", "torch", "numpy", "random"])
def test_a_forward_that_depends_on_mode_or_random_numbers_is_not_traced(what: str) -> None:
    model = DecidesInPython(what)
    with pytest.raises(CannotTrace, match=r"eval mode|random numbers"):
        FxPartition(model)
    assert type(model) is DecidesInPython
    assert model.training


def test_an_attribute_that_was_read_must_not_change() -> None:
    model = DecidesInPython("attribute")
    partition = FxPartition(model)
    partition.apply(model, LocalStages([0], [0], [id(p) for p in model.parameters()], torch.device("cpu")))
    vars(model)["other"] = 3.0  # the forward has not read it
    partition.compute(model, 0, StageInput(model, (torch.ones(1, 3),), {}, lambda: None), [])
    model.share = 0.25
    with pytest.raises(
        LoopError, match=r"(?s)DecidesInPython.share has changed.* 0.25 now.\n.*It was 0.5 when .*register_buffer"
    ):
        partition.compute(model, 0, StageInput(model, (torch.ones(1, 3),), {}, lambda: None), [])


def test_a_forward_with_any_number_of_arguments_is_not_traced() -> None:
    class AnyNumber(nn.Sequential):
        def forward(self, *xs: Tensor) -> Tensor:
            out: Tensor = self[1](self[0](xs[0]))
            return out

    with pytest.raises(CannotTrace, match="any number"):
        FxPartition(AnyNumber(nn.Linear(3, 3), nn.Linear(3, 3)))
