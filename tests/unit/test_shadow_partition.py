"""A model whose forward is run by every stage: the stages, one after the other, are the model; and what is no row of
stages is told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unisono.errors import LoopError
from unisono.parallel.pipeline_parallel.partition import StageInput
from unisono.parallel.pipeline_parallel.shadow_partition import ShadowPartition
from unisono.parallel.pipeline_parallel.shadow_tensor import ShadowTensor


def pieces(
    model: nn.Module, stages: int, *args: Any, names: tuple[str, ...] = (), **kwargs: Any
) -> tuple[Any, list[Any]]:
    """The model's output, computed stage by stage as if each had a process of its own, and what crossed."""
    torch.manual_seed(3)
    owners = [copy.deepcopy(model) for _ in range(stages)]
    received: Any = ()
    dice = torch.get_rng_state()
    crossed, output = [], None
    for stage, own in enumerate(owners):
        replay = ShadowPartition(own, "a test")
        begins, forward = replay.begins(stages, names), own.forward
        users = replay.users(own, begins)
        replay.settle(own, begins, [stage], {id(p) for p in own.parameters() if stage in users[id(p)]})
        left = dice

        def begin(left: Tensor = left) -> None:
            torch.set_rng_state(left)

        output, received = replay.compute(own, stage, StageInput(forward, args, kwargs, begin), received)
        dice = torch.get_rng_state()
        crossed.append([tuple(t.shape) for t in received[:-1]])
    return output, crossed[:-1]


class Block(nn.Module):
    """Of a pair, and with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x: Tensor, *, mask: Tensor, more: dict[str, Tensor]) -> dict[str, Any]:
        return {"x": self.drop(self.inner(x)) * mask + more["memory"], "sizes": (x.shape[1], None)}


class Branches(nn.Module):
    """Looks into its inputs, computes without gradients, draws between modules, keeps a list, returns a class."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))  # of no module
        self.enter, self.place, self.drop = nn.Linear(4, 6), nn.Embedding(9, 6), nn.Dropout(0.5)
        self.rows = nn.ModuleList(Block() for _ in range(3))
        self.leave = nn.Linear(6, 2)

    def forward(self, x: Tensor, **options: Any) -> dict[str, Any]:
        mask = (x.sum(-1, keepdim=True) > 0).float() if x.sum() > 0 else torch.ones(1)
        with torch.no_grad():
            places = torch.arange(x.shape[1])
        h = memory = self.drop(self.enter(x) * self.scale + self.place(places))
        seen = []
        for row in self.rows:
            out = row(h, mask=mask, more={"memory": memory})
            h = out["x"]
            assert h.dtype == torch.float32
            seen.append(out["sizes"][0])
        return {"out": self.leave(h.view(-1, 6)), "seen": seen}


def plain(model: nn.Module, *args: Any) -> Any:
    torch.manual_seed(3)
    return model(*args)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_stages_are_the_model(stages: int, sign: int) -> None:
    model, x = Branches(), sign * torch.rand(2, 5, 4)
    output, crossed = pieces(model, stages, x)
    expected = plain(model, x)
    assert torch.equal(output["out"], expected["out"])
    assert output["seen"] == expected["seen"] == [5, 5, 5]
    assert crossed[:1] in ([], [[(2, 5, 6)]], [[(2, 5, 6), (2, 5, 6)]])  # the stream, and the memory beside it


def test_a_cut_before_and_behind_the_rows() -> None:
    model, x = Branches(), torch.rand(2, 5, 4)
    for name in ("rows.0", "leave"):
        output, crossed = pieces(model, 2, x, names=(name,))
        assert torch.equal(output["out"], plain(model, x)["out"])
        assert len(crossed[0]) == 1


class Backwards(nn.Module):
    """Calls its modules in another order than it has them."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


class Says(Backwards):
    """And says what it can be tried with."""

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        return {"x": torch.zeros(1, 3)}


def test_a_model_that_can_be_tried_may_have_its_modules_in_any_order() -> None:
    model, x = Says(), torch.rand(2, 3)
    output, crossed = pieces(model, 2, x)
    assert torch.equal(output, model(x))
    assert crossed == [[(2, 3)]]
    assert model.first.training


class Again(Backwards):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(self.second(x)))
        return out


class Never(Backwards):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(x)
        return out


class Skip(Backwards):
    def forward(self, x: Tensor) -> Tensor:
        x = self.second(x)
        twice = x * 2
        out: Tensor = self.first(x) + twice
        return out


class Looks(Backwards):
    def forward(self, x: Tensor) -> Tensor:
        x = self.second(x)
        out: Tensor = self.first(x if x.sum() > 0 else -x)
        return out


class Writes(Backwards):
    def forward(self, x: Tensor) -> Tensor:
        room = torch.zeros(2, 6)
        room[:, :3] = self.second(x)
        out: Tensor = self.first(room[:, :3])
        return out


class Borrows(Backwards):
    """Computes with the weight of a module that another stage has."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(self.second(x)) @ self.second.weight
        return out


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Backwards, "In stage 1 it called second of stage 0"),
        (Again, "In stage 1 it called second of stage 0"),
        (Never, "had returned in stage 0 before it called any of first"),
        (Skip, "compute with what comes from second of stage 0"),
        (Looks, "What second of stage 0 computes was looked into"),
        (Writes, "writes it into a tensor that is no part of it"),
        (Borrows, "compute with what comes from second.weight of stage 0.* it is sent.* first"),
    ],
)
def test_what_is_no_row_of_stages_is_told(build: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(LoopError, match=f"(?s){words}"):
        pieces(build(), 2, torch.ones(2, 3))


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Opaquely(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x[self.body(x)])
        return out


class Opaquely(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor) -> Any:
        return slice(0, 1)


def test_what_cannot_be_told_is_refused() -> None:
    with pytest.raises(LoopError, match=r"(?s)body was called.*returned a slice.*use_cache"):
        pieces(Trunk(), 2, torch.ones(2, 3))


def test_parts_keep_their_names_and_attributes_and_nothing_else() -> None:
    model = Branches()
    replay = ShadowPartition(model, "a test")
    begins = replay.begins(2, ["rows.1"])
    replay.settle(model, begins, [0], {id(p) for link in replay.links[: begins[1]] for p in link.params})
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"enter", "place", "rows"}
    assert [name for name, _ in model.named_parameters() if name.startswith("rows.")] == [
        "rows.0.inner.weight",
        "rows.0.inner.bias",
    ]
    weight = model.leave.weight
    assert isinstance(weight, ShadowTensor)
    assert (weight.shape, weight.dtype, weight.device.type) == ((2, 6), torch.float32, "cpu")
    with pytest.raises(LoopError, match="leave was called by itself"):
        model.leave(torch.ones(6))
    with pytest.raises(LoopError, match=r"leave\.weight was called by itself"):
        weight + 1
