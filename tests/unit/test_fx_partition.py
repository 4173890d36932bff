"""A model's forward, followed and cut: its pieces, one after the other, are the model."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.ranks.training import MLP, TinyGPT
from unisono.errors import LoopError
from unisono.parallel.pipeline_parallel.fx_partition import CannotTrace, FxPartition, compute
from unisono.parallel.pipeline_parallel.partition import StageInput
from unisono.recipes.text import GPT, Model


class Skips(nn.Module):
    """What the first module makes goes on to the last one; positions follow from the input's length; a call twice."""

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


class Quiet(nn.Sequential):
    """Computes without gradients between two modules, which cannot be followed."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        with torch.no_grad():
            x = x + 1
        out: Tensor = self[1](x)
        return out


def tokens(vocabulary: int, length: int) -> Tensor:
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
    x = {"GPT": tokens(256, length), "TinyGPT": tokens(23, length), "MLP": torch.randn(length, 12)}.get(
        name, torch.randn(2, length, 4)
    )
    chain = FxPartition(model)
    if name == "MLP" and stages == 3:
        with pytest.raises(LoopError, match="of which 2 have parameters"):
            chain.begins(stages, [])
        return
    pieces, received = chain.pieces(chain.begins(stages, [])), list[Tensor]()
    for piece in pieces:
        output, received = compute(model, piece, chain.bind((x,), {}), received)
    assert torch.equal(output, model(x))


def test_the_cut_is_even_and_narrow() -> None:
    """A lookup costs nothing, so the embedding does not count; what crosses is the stream, not two halves of a sum."""
    chain = FxPartition(GPT(Model(width=64, depth=6, heads=2, context=16)))
    for stages, names in {2: ["blocks.3"], 3: ["blocks.2", "blocks.4"]}.items():
        begins = chain.begins(stages, [])
        assert [chain.links[first].name for first in begins[1:]] == names
        assert all(len(piece.receives) == 1 for piece in chain.pieces(begins)[1:])
    assert chain.begins(2, ["norm"]) == [0, 7]


def test_what_was_left_at_its_default_stays_there() -> None:
    chain = FxPartition(Skips())
    assert list(chain.bind((1,), {"scale": 2.0})) == ["x", "scale"]
    with pytest.raises(LoopError, match="called with scale"):
        chain.bind((1,), {"scale": 3.0})


def test_a_forward_that_changes_torchs_mode_is_refused() -> None:
    with pytest.raises(CannotTrace, match=r"torch\.no_grad"):
        FxPartition(Quiet())


class Decides(nn.Module):
    """Has Python decide something between its modules."""

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
def test_a_forward_in_which_python_decides_is_not_followed(what: str) -> None:
    model = Decides(what)
    with pytest.raises(CannotTrace, match=r"eval mode|random numbers"):
        FxPartition(model)
    assert type(model) is Decides
    assert model.training


def test_an_attribute_that_was_read_must_stay_as_it_was() -> None:
    model = Decides("attribute")
    chain = FxPartition(model)
    chain.settle(model, [0], [0], [id(p) for p in model.parameters()])
    vars(model)["other"] = 3.0  # nobody has read it
    chain.compute(model, 0, StageInput(model, (torch.ones(1, 3),), {}, lambda: None), [])
    model.share = 0.25
    with pytest.raises(LoopError, match=r"(?s)Decides.share is 0.25 now.\n  It was 0.5 when .*register_buffer"):
        chain.compute(model, 0, StageInput(model, (torch.ones(1, 3),), {}, lambda: None), [])


def test_any_number_of_arguments_is_not_followed() -> None:
    class Any_(nn.Sequential):
        def forward(self, *xs: Tensor) -> Tensor:
            out: Tensor = self[1](self[0](xs[0]))
            return out

    with pytest.raises(CannotTrace, match="any number"):
        FxPartition(Any_(nn.Linear(3, 3), nn.Linear(3, 3)))
