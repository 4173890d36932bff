"""Stages that run the whole forward have the result of the model, and other orders of calls are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unisono.errors import LoopError
from unisono.parallel.pipeline_parallel.partition import LocalStages, StageInput
from unisono.parallel.pipeline_parallel.shadow_partition import ShadowPartition
from unisono.parallel.pipeline_parallel.shadow_tensor import ShadowTensor


def run_stages(
    model: nn.Module, stages: int, *args: Any, names: tuple[str, ...] = (), **kwargs: Any
) -> tuple[Any, list[Any]]:
    """Run a model stage by stage, each on a copy; return its output and the shapes that were sent."""
    torch.manual_seed(3)
    owners = [copy.deepcopy(model) for _ in range(stages)]
    received: Any = ()
    rng_state = torch.get_rng_state()
    sent, output = [], None
    for stage, own in enumerate(owners):
        partition = ShadowPartition(own, "a test")
        starts, forward = partition.stage_starts(stages, names), own.forward
        stages_of = partition.stages_of_params(own, starts)
        partition.apply(
            own,
            LocalStages(
                starts, [stage], {id(p) for p in own.parameters() if stage in stages_of[id(p)]}, torch.device("cpu")
            ),
        )
        rng_of_stage = rng_state

        def begin(rng_of_stage: Tensor = rng_of_stage) -> None:
            torch.set_rng_state(rng_of_stage)

        output, received = partition.compute(own, stage, StageInput(forward, args, kwargs, begin), received)
        rng_state = torch.get_rng_state()
        sent.append([tuple(t.shape) for t in received[:-1]])
    return output, sent[:-1]


class Block(nn.Module):
    """A layer with dropout that takes keyword arguments and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x: Tensor, *, mask: Tensor, more: dict[str, Tensor]) -> dict[str, Any]:
        return {"x": self.drop(self.inner(x)) * mask + more["memory"], "sizes": (x.shape[1], None)}


class Branches(nn.Module):
    """Branch on input values, compute without gradients, draw between modules, keep a list, return a dict."""

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


def run_model(model: nn.Module, *args: Any) -> Any:
    torch.manual_seed(3)
    return model(*args)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_stages_are_the_model(stages: int, sign: int) -> None:
    model, x = Branches(), sign * torch.rand(2, 5, 4)
    output, sent = run_stages(model, stages, x)
    expected = run_model(model, x)
    assert torch.equal(output["out"], expected["out"])
    assert output["seen"] == expected["seen"] == [5, 5, 5]
    assert sent[:1] in ([], [[(2, 5, 6)]], [[(2, 5, 6), (2, 5, 6)]])  # the activations, and the memory


def test_stages_may_start_before_and_after_the_rows() -> None:
    model, x = Branches(), torch.rand(2, 5, 4)
    for name in ("rows.0", "leave"):
        output, sent = run_stages(model, 2, x, names=(name,))
        assert torch.equal(output["out"], run_model(model, x)["out"])
        assert len(sent[0]) == 1


class Backwards(nn.Module):
    """Call modules in another order than that of their definitions."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


class WithExample(Backwards):
    """Has example inputs."""

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        return {"x": torch.zeros(1, 3)}


def test_a_model_with_example_inputs_may_define_its_modules_in_any_order() -> None:
    model, x = WithExample(), torch.rand(2, 3)
    output, sent = run_stages(model, 2, x)
    assert torch.equal(output, model(x))
    assert sent == [[(2, 3)]]
    assert model.first.training


class CallsTwice(Backwards):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(self.second(x)))
        return out


class CallsOne(Backwards):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(x)
        return out


class Skip(Backwards):
    def forward(self, x: Tensor) -> Tensor:
        x = self.second(x)
        twice = x * 2
        out: Tensor = self.first(x) + twice
        return out


class ReadsValues(Backwards):
    def forward(self, x: Tensor) -> Tensor:
        x = self.second(x)
        out: Tensor = self.first(x if x.sum() > 0 else -x)
        return out


class WritesSlice(Backwards):
    def forward(self, x: Tensor) -> Tensor:
        room = torch.zeros(2, 6)
        room[:, :3] = self.second(x)
        out: Tensor = self.first(room[:, :3])
        return out


class UsesWeight(Backwards):
    """Compute with the weight of a module of another stage."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(self.second(x)) @ self.second.weight
        return out


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Backwards, "In stage 1 it called second of stage 0"),
        (CallsTwice, "In stage 1 it called second of stage 0"),
        (CallsOne, "returned in stage 0 before it called any of first"),
        (Skip, "needs a result that it does not get: that of second of stage 0"),
        (ReadsValues, "reads values of what second of stage 0 computes"),
        (WritesSlice, "writes it into a tensor that is no part of it"),
        (UsesWeight, "does not get: that of second.weight of stage 0.*its first module is called, first"),
    ],
)
def test_a_forward_that_is_no_row_of_stages_is_refused(build: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(LoopError, match=f"(?s){words}"):
        run_stages(build(), 2, torch.ones(2, 3))


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = ReturnsSlice(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x[self.body(x)])
        return out


class ReturnsSlice(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor) -> Any:
        return slice(0, 1)


def test_an_output_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(LoopError, match=r"(?s)body returned a slice.*use_cache"):
        run_stages(Trunk(), 2, torch.ones(2, 3))


def test_parameters_of_other_stages_become_shadows() -> None:
    model = Branches()
    partition = ShadowPartition(model, "a test")
    starts = partition.stage_starts(2, ["rows.1"])
    kept = {id(p) for link in partition.links[: starts[1]] for p in link.params}
    partition.apply(model, LocalStages(starts, [0], kept, torch.device("cpu")))
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
