"""Correct use of the loop and of Run's methods: the same values on each process, for any number of processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from tests.ranks.loops import SETTINGS, Loop, Numbers, attempt, linear, loss_of, sgd, train, whole
from unisono.config import LoaderSettings, Settings
from unisono.environment import World
from unisono.monitor import timeline
from unisono.testing import close_run, run_ranks, run_result
from unisono.train.run import Run
from unisono.train.step import Step

SIZES = (1, 2, 3, 4)


def skip_micro_batches(run: Run[Any]) -> Any:
    def body(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
        if (i % 2 == 0).all():
            return  # like `continue` in the user's loop
        whole(step, model, x, i)

    def after(step: Step, optimizer: Any) -> Any:
        step.update(optimizer)
        return step.loss, step.weight

    return train(run, body, after)


def zero_weights(run: Run[Any]) -> Any:
    def body(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
        counts = not (i % 2 == 0).all()
        step.backward(loss_of(model, x) * float(counts), weight=torch.tensor(len(i) * counts))

    def after(step: Step, optimizer: Any) -> Any:
        step.update(optimizer)
        return step.loss, step.weight

    return train(run, body, after)


def sums(run: Run[Any]) -> Any:
    """Add `all` on each process, `some` for the samples 7 and 8, and `bare` with the default weight of 1."""

    def body(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
        step.add("all", i.sum(), len(i))
        if 7 in i or 8 in i:
            step.add("some", float(i.sum()), torch.tensor(2.0))
            step.add("bare", 1)
        whole(step, model, x, i)
        step.add("all", x.sum() * 0.0, 0)

    def after(step: Step, optimizer: Any) -> Any:
        known = ["all", *(["some", "bare"] if step.number in (0, 1, 2) and has_some(step) else [])]
        step.update(optimizer)
        return {name: (step.sum(name), step.mean(name)) for name in known}

    return train(run, body, after)


def has_some(step: Step) -> bool:
    order = step._parts.checks.order
    return any({7, 8} & set(batch) for rank in range(4) for batch in order.micro_batches(step.number, rank))


def step_facts(run: Run[Any]) -> Any:
    def after(step: Step, optimizer: Any) -> Any:
        norm = step.grad_norm
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        assert norm == pytest.approx(float(torch.nn.utils.get_total_norm(grads)), rel=1e-6)
        step.update(optimizer)
        assert all(p.grad is None for group in optimizer.param_groups for p in group["params"])
        number, requested = step.number, (step.every(2), step.every(7), step.ends_epoch)
        return number, step.epoch, step.samples, step.loss, norm, step.skipped, *requested

    return train(run, after=after)


def clipped_by(clip: Callable[[Step, Any], Any]) -> Loop:
    def after(step: Step, optimizer: Any) -> Any:
        clip(step, optimizer)
        return step.loss, step.grad_norm

    return lambda run: train(run, after=after)


def clip_by_hand(step: Step, optimizer: Any) -> None:
    step._state.grad_norm = float(torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.3))
    step.update(optimizer, clip=None)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 3, bias=False)
        self.down = nn.Linear(3, 3)
        self.down.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x).tanh())
        return out


def tied(run: Run[Any]) -> Any:
    """Check that the gradient of a tied weight is that of the whole batch, up to rounding."""
    data, model = Numbers(), Tied()

    def after(step: Step, optimizer: Any) -> Any:
        order = step._parts.checks.order
        numbers = [n for rank in range(4) for batch in order.micro_batches(step.number, rank) for n in batch]
        loss = loss_of(model, torch.stack([data[n][0] for n in numbers])) / step.samples
        plain = torch.autograd.grad(loss, list(model.parameters()))
        for p, expected in zip(model.parameters(), plain, strict=True):
            assert torch.allclose(p.grad, expected, rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]
        step.update(optimizer)
        return float(loss) == pytest.approx(step.loss)

    return train(run, after=after, build=lambda: model)


def freeze_and_unfreeze(run: Run[Any]) -> Any:
    """Freeze the weight up to step 1, and the bias after it. Frozen parameters do not change and have no gradient."""
    results = []
    model = run.place(linear)
    weight, bias = model.get_parameter("weight"), model.get_parameter("bias")
    optimizer = sgd(model)
    run.track(model=model, optimizer=optimizer)
    weight.requires_grad_(False)
    for step in run.steps(Numbers()):
        if step.number == 1:
            weight.requires_grad_(True)
            bias.requires_grad_(False)
        before = weight.clone(), bias.clone()
        for x, i in step:
            whole(step, model, x, i)
        given = [p.grad is not None for p in (weight, bias)]
        step.update(optimizer)
        results.append((step.loss, given, [bool((a != b).any()) for a, b in zip(before, (weight, bias), strict=True)]))
    return [*results, run.context.state.fingerprint()]


def with_schedules(run: Run[Any]) -> Any:
    model = run.place(linear)
    optimizer = sgd(model)
    schedules = StepLR(optimizer, 1, 0.5), StepLR(optimizer, 2, 0.1)
    run.track(model=model, optimizer=optimizer, one=schedules[0], two=schedules[1])
    rates = []
    for step in run.steps(Numbers()):
        for x, i in step:
            whole(step, model, x, i)
        rates.append(optimizer.param_groups[0]["lr"])
        step.update(*schedules, optimizer)  # in any order: optimizers are stepped first
    return rates


def stop_in(where: str) -> Loop:
    """Call run.stop() on one process, during or after the micro-batches of step 1."""

    def loop(run: Run[Any]) -> Any:
        model = run.place(linear)
        optimizer = sgd(model)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(Numbers()):
            for x, i in step:
                whole(step, model, x, i)
                if where == "round" and step.number == 1 and run.rank == run.size - 1:
                    run.stop()
            step.update(optimizer)
            if where == "end" and step.number == 1 and run.rank == run.size - 1:
                run.stop()
        saved = sorted(path.name for path in (run.dir / "checkpoints").iterdir())
        return run.context.progress.steps_done, run_result(run)["stopped"], run_result(run)["samples"], saved

    return loop


def use_first(run: Run[Any]) -> Any:
    """Download on the first process; the others find the file."""
    file = run.dir / "fetched once"
    with run.first():
        found = file.exists()
        if not found:
            file.write_text("")
    return found == (run.rank > 0)


def log_values(run: Run[Any]) -> Any:
    def after(step: Step, optimizer: Any) -> None:
        step.update(optimizer)
        run.log({"a": step.number}, tensor=torch.tensor(0.5), small=np.float32(0.25), word="ü", nothing=None)
        run.log(again=step.loss)

    train(run, after=after)
    close_run(run)
    lines = list(timeline.read(run.dir / "timeline" / f"rank-{run.rank}.jsonl"))
    lines = [line for line in lines if "seconds" in line]  # the others are events
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [line["log"]["again"] for line in lines] == [line["loss"] for line in lines]
    names = ("a", "tensor", "small", "word", "again", "loss")
    return lines[-1]["log"], {name: run_result(run)[name] for name in names}


class GrowingModel(nn.Sequential):
    """Linear layers, and a buffer of type int16."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3))
        self.register_buffer("shorts", torch.arange(3, dtype=torch.int16))  # gloo does not support int16
        self.nothing = nn.Parameter(torch.zeros(0, dtype=torch.float64))


def grow_model(run: Run[Any]) -> Any:
    """Add a layer after step 1, whose weights differ among processes until they are synchronized."""

    def after(step: Step, optimizer: Any) -> None:
        step.update(optimizer)
        if step.number == 1:
            torch.manual_seed(run.rank)
            layer = nn.Linear(3, 2)
            models[0].append(layer)
            optimizer.add_param_group({"params": layer.parameters()})

    models: list[Any] = []

    def build() -> nn.Module:
        models.append(GrowingModel())
        return models[0]

    results = train(run, after=after, build=build)
    assert float(models[0][1].weight.detach().abs().sum()) > 0
    return results


LOOPS: dict[str, tuple[Loop, Settings]] = {
    "growing": (grow_model, replace(SETTINGS, steps=5)),
    "skipping": (skip_micro_batches, SETTINGS),
    "weightless": (zero_weights, SETTINGS),
    "sums": (sums, SETTINGS),
    "facts": (step_facts, replace(SETTINGS, steps=5)),
    "clipped by the setting": (clipped_by(lambda step, o: step.update(o)), replace(SETTINGS, clip=0.3)),
    "clipped by argument": (clipped_by(lambda step, o: step.update(o, clip=0.3)), replace(SETTINGS, clip=9.0)),
    "clipped by hand": (clipped_by(clip_by_hand), replace(SETTINGS, clip=1e-9)),
    "tied": (tied, SETTINGS),
    "thawing": (freeze_and_unfreeze, SETTINGS),
    "scheduled": (with_schedules, replace(SETTINGS, steps=5)),
    "stopped in a round": (stop_in("round"), SETTINGS),
    "stopped at the end": (stop_in("end"), replace(SETTINGS, steps=6)),
    "first": (use_first, SETTINGS),
    "logged": (log_values, SETTINGS),
}


# -- evaluation


def powers(out: torch.Tensor, x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return a power of two per sample: the sum shows which samples were used, and how often."""
    return (2.0 ** i.double()).sum(), len(i)


def errors(out: torch.Tensor, x: torch.Tensor, i: torch.Tensor) -> dict[str, Any]:
    found = {"square": (out.pow(2).sum(), out.numel()), "count": (float(len(i)), 1.0)}
    return found | ({"rare": (out.sum(), 1)} if 3 in i else {})


class Noisy(Numbers):
    """Adds random noise, which is the same for a sample of an evaluation on any process."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        x, i = super().__getitem__(i)
        return x + torch.rand(3), i


class MixedModes(nn.Module):
    """A module with dropout, and one that is always in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(3, 2), nn.Dropout(0.5)
        self.backbone = nn.Dropout(0.9).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        assert not any(part.training for part in self.modules())
        out: torch.Tensor = self.backbone(self.drop(self.linear(x)))
        return out


def evaluate_in_worker(run: Run[Any]) -> Any:
    return run.evaluate(run.place(MixedModes), Noisy(13), errors)


def evaluate_models(run: Run[Any]) -> Any:
    model = run.place(MixedModes)
    torch.manual_seed(7)
    values: list[Any] = [run.evaluate(model, Numbers(n), powers)["powers"] for n in (1, 2, 13, 20)]
    values += [run.evaluate(model, Noisy(13), errors)]
    values += [run.evaluate(model, Noisy(13), errors, forward=lambda m, batch: m(batch[0]) * 2)]
    modes = {name: part.training for name, part in model.named_modules()}
    return values, modes, torch.rand(1).item()


WORKERS = replace(SETTINGS, loader=LoaderSettings(workers=1))
LOOPS |= {"evaluated": (evaluate_models, SETTINGS), "evaluated by a worker": (evaluate_in_worker, WORKERS)}


def run_all(world: World, folder: str) -> dict[str, Any]:
    return {name: attempt(world, Path(folder, name), loop, config) for name, (loop, config) in LOOPS.items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each loop on all processes of runs on 1 to 4 processes."""
    return [results for size in SIZES for results in run_ranks(run_all, size, str(tmp_path_factory.mktemp("loops")))]


@pytest.mark.parametrize("loop", LOOPS)
def test_results_are_equal_on_any_number_of_processes(results: list[dict[str, Any]], loop: str) -> None:
    first, *others = [each[loop] for each in results]
    assert not isinstance(first, str), first
    assert others == [first] * (sum(SIZES) - 1)


def test_micro_batch_without_backward_has_weight_zero(results: list[dict[str, Any]]) -> None:
    assert results[0]["skipping"] == results[0]["weightless"]
    assert sum(weight for _, weight in results[0]["skipping"][:3]) < 20


def test_step_add_is_exact(results: list[dict[str, Any]]) -> None:
    steps = results[0]["sums"][:3]
    assert sum(step["all"][0] for step in steps) == sum(range(20))
    assert any("some" in step for step in steps)
    for step in steps:
        if "some" in step:
            (total, mean), (count, one) = step["some"], step["bare"]
            assert mean == total / (2 * count)
            assert one == 1.0


def test_attributes_of_a_step(results: list[dict[str, Any]]) -> None:
    steps = results[0]["facts"][:5]
    assert [step[:3] for step in steps] == [(0, 0, 8), (1, 0, 8), (2, 0, 4), (3, 1, 8), (4, 1, 8)]
    assert [step[5:] for step in steps] == [
        (False, False, False, False),
        (False, True, False, False),
        (False, False, False, True),
        (False, True, False, False),
        (False, True, True, True),  # true in the last step
    ]


def test_clipping_matches_torch(results: list[dict[str, Any]]) -> None:
    ours, by_hand = results[0]["clipped by the setting"], results[0]["clipped by hand"]
    assert ours == results[0]["clipped by argument"]
    for pair, theirs in zip(
        ours[:-1], by_hand[:-1], strict=True
    ):  # this norm is a sum over rows (train/optimization/grad_norm.py)
        assert pair == pytest.approx(theirs, rel=1e-6)
    assert ours != results[0]["facts"]


def test_frozen_and_unfrozen_parameters(results: list[dict[str, Any]]) -> None:
    given, moved = zip(*(step[1:] for step in results[0]["thawing"][:3]), strict=True)
    assert given == ([False, True], [True, False], [True, False])
    assert moved == ([False, True], [True, False], [True, False])


def test_schedule_is_stepped_once_per_step(results: list[dict[str, Any]]) -> None:
    assert results[0]["scheduled"] == pytest.approx([0.05, 0.025, 0.00125, 0.000625, 0.00003125])


def test_stop_on_one_process_stops_all(results: list[dict[str, Any]]) -> None:
    assert results[0]["stopped in a round"] == (2, True, 16, ["step-00000002"])
    assert results[0]["stopped at the end"] == (3, True, 20, ["step-00000003"])


def test_run_first_orders_processes(results: list[dict[str, Any]]) -> None:
    assert all(each["first"] for each in results)


def test_logged_values_are_in_the_result(results: list[dict[str, Any]]) -> None:
    line, result = results[0]["logged"]
    assert {"a": 2, "tensor": 0.5, "small": 0.25, "word": "ü", "nothing": None}.items() <= line.items()
    assert {"a": 2, "tensor": 0.5, "small": 0.25, "word": "ü"}.items() <= result.items()
    assert result["again"] == result["loss"]


def test_evaluation_uses_each_sample_once(results: list[dict[str, Any]]) -> None:
    values, modes, _ = results[0]["evaluated"]
    assert values[:4] == [(2**n - 1) / n for n in (1, 2, 13, 20)]
    assert values[4].keys() == {"square", "count", "rare"}
    assert values[4]["count"] == 13 / 7  # six micro-batches of two samples and one of one
    assert values[5]["square"] == pytest.approx(4 * values[4]["square"])
    assert modes == {"": True, "linear": True, "drop": True, "backbone": False}
    assert results[0]["evaluated by a worker"] == values[4]
    torch.manual_seed(7)
    assert results[0]["evaluated"][2] == torch.rand(1).item()
