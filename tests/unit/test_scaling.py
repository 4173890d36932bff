"""Learning rates for other batch sizes and widths: the rules of the papers, and wrong arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono import scaling
from unisono.errors import LoopError


class Net(nn.Module):
    """An input, a hidden and an output layer, with norm and embedding, whose initial weights scale as torch's do."""

    def __init__(self, width: int, classes: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.enter = nn.Linear(3, width)
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width, bias=False)
        self.leave = nn.Linear(2 * width, classes)
        self.gain = nn.Parameter(torch.ones(()))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.enter(x)) + self.embed(x[:, 0].long() % 7)
        out: Tensor = self.leave(F.relu(self.inner(F.relu(hidden))) * self.scale) * self.gain
        return out


def widths_of(width: int, base: int = 16) -> scaling.WidthScaling:
    return scaling.WidthScaling(lambda: Net(width), lambda: Net(base))


def test_learning_rates_follow_the_batch_size() -> None:
    assert scaling.linear_scaling(0.1, batch=1024, base_batch=256) == 0.4
    assert scaling.sqrt_scaling(0.1, batch=64, base_batch=256) == 0.05
    options = scaling.sqrt_scaling_adam(lr=1e-3, batch=256, base_batch=64)
    assert options == {"lr": 2e-3, "betas": pytest.approx((0.6, 0.996)), "eps": 5e-9}
    torch.optim.AdamW([nn.Parameter(torch.ones(1))], **options)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: scaling.linear_scaling(0.1, batch=0, base_batch=4), "cannot be scaled to this batch size"),
        (lambda: scaling.sqrt_scaling_adam(lr=0.1, batch=1280, base_batch=64), "betas .* cannot be scaled"),
        (lambda: scaling.warmup_cosine(adam(nn.Linear(1, 1)), warmup=5, total=5), "does not fit a run of 5 steps"),
        (lambda: scaling.warmup_cosine(adam(nn.Linear(1, 1)), warmup=0, total=5), "warm-up of 0 steps"),
        (lambda: scaling.WidthScaling(lambda: nn.Linear(8, 8), lambda: nn.Linear(4, 4, bias=False)), "other param"),
        (lambda: scaling.WidthScaling(lambda: Raw(8, 8), lambda: Raw(4, 2)), "which dim of the parameter weight"),
        (lambda: scaling.WidthScaling(lambda: Raw(8, 8, 8), lambda: Raw(4, 4, 4)), "grows in a way that is not known"),
        (
            lambda: scaling.WidthScaling(lambda: Raw(8, 8), lambda: Raw(4, 4), input_dims={"weight": 2}),
            "Dim 2 of the parameter weight does not grow",
        ),
        (lambda: scaling.coordinate_check({4: lambda: made(4)}, torch.ones(1, 3), torch.sum), "at least two widths"),
    ],
)
def test_wrong_arguments(call: Callable[[], Any], error: str) -> None:
    with pytest.raises(LoopError, match=error):
        call()


class Raw(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.5)


def test_the_warm_up_is_linear_and_the_cosine_ends_at_0() -> None:
    one, two = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [one], "lr": 1.0}, {"params": [two], "lr": 0.25}])
    schedule = scaling.warmup_cosine(optimizer, warmup=3, total=7)
    rates = []
    for _ in range(8):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    cosine = [(1 + math.cos(math.pi * step / 4)) / 2 for step in range(5)]
    assert [rate for rate, _ in rates] == pytest.approx([0.25, 0.5, 0.75, *cosine])
    assert [rate for _, rate in rates] == pytest.approx([rate / 4 for rate, _ in rates])


def test_factors_are_those_of_the_paper() -> None:
    widths = widths_of(64)
    assert widths["gain"] == scaling.ParameterWidth("scalar")
    assert widths["inner.weight"] == scaling.ParameterWidth("matrix", 4.0, 4.0)
    assert (widths["inner.weight"].init, widths["inner.weight"].adam, widths["inner.weight"].sgd) == (0.5, 0.25, 1.0)
    for name in ("embed.weight", "enter.weight", "enter.bias", "norm.weight", "leave.weight"):
        assert (widths[name].kind, widths[name].init, widths[name].adam, widths[name].sgd) == ("vector", 1.0, 1.0, 4.0)
    assert widths["leave.bias"].kind == "scalar"
    turned = scaling.WidthScaling(lambda: Raw(8, 8), lambda: Raw(4, 2), input_dims={"weight": 0})
    assert (turned["weight"].fan_in, turned["weight"].fan_out) == (2.0, 4.0)
    assert scaling.WidthScaling(lambda: nn.Linear(8, 12), lambda: nn.Linear(4, 4))["weight"].fan_in == 2.0
    transposed = scaling.WidthScaling(lambda: nn.ConvTranspose1d(8, 12, 3), lambda: nn.ConvTranspose1d(4, 4, 3))
    assert (transposed["weight"].fan_in, transposed["weight"].fan_out) == (2.0, 3.0)
    assert (scaling.output_scale(64, 16), scaling.attention_scale(64, 16)) == (0.25, 1 / 16)
    assert scaling.attention_scale(16, 16) == 0.25


def test_groups_have_scaled_rates_and_the_same_decay() -> None:
    model, widths = Net(64), widths_of(64)
    for rule, factors in (("adam", [1.0, 0.25]), ("sgd", [4.0, 1.0])):
        groups = widths.groups(model, lr=0.1, rule=rule, weight_decay=0.2)  # type: ignore[arg-type]
        assert [group["lr"] for group in groups] == [0.1 * factor for factor in factors]
        assert [group["lr"] * group["weight_decay"] for group in groups] == pytest.approx([0.02, 0.02])
        assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert widths.groups(model, lr=0.1)[1]["params"] == [model.inner.weight]


def test_initial_weights_have_the_size_of_the_base() -> None:
    widths = widths_of(256)
    torch.manual_seed(3)
    model = Net(256)
    after = torch.get_rng_state()
    widths.apply_init(model)
    assert torch.equal(torch.get_rng_state(), after), "the base model takes random numbers of the script"
    base = Net(16)
    for name, factor in (("embed.weight", 1.0), ("inner.weight", 0.25), ("leave.weight", 1.0), ("norm.weight", 1.0)):
        size, narrow = (m.get_parameter(name).square().mean().sqrt().item() for m in (model, base))
        assert size == pytest.approx(narrow * factor, rel=0.15), name
    torch.manual_seed(3)
    same, plain = Net(16), Net(16)
    plain.load_state_dict(same.state_dict())
    widths_of(16).apply_init(same)
    assert all(torch.equal(a, b) for a, b in zip(same.parameters(), plain.parameters(), strict=True))


def made(width: int, *, maximal: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, widths = Net(width), widths_of(width, 64)
    if not maximal:
        return model, torch.optim.Adam(model.parameters(), lr=0.02)
    widths.apply_init(model)
    model.scale = scaling.output_scale(width, 64)
    return model, torch.optim.Adam(widths.groups(model, lr=0.02))


def test_the_coordinate_check_tells_both_parametrizations_apart() -> None:
    random = torch.Generator().manual_seed(1)
    x, y = torch.randn(16, 3, generator=random), torch.arange(16) % 5
    maximal, standard = (
        scaling.coordinate_check(
            {n: lambda n=n, m=m: made(n, maximal=m) for n in (64, 128, 256, 512)},  # type: ignore[misc]
            x,
            lambda output: F.cross_entropy(output, y),
        )
        for m in (True, False)
    )
    assert abs(maximal.growth("inner")) < 0.15
    assert standard.growth("inner") > 0.4
    assert maximal.worst[1] < 0.2 < standard.worst[1]
    assert str(maximal).splitlines()[0].split() == ["layer", "64", "128", "256", "512", "power"]
    assert len(maximal.sizes["inner"][64]) == 4
