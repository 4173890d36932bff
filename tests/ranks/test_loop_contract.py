"""The contract of the loop (docs/guide/loop.md): each violation raises the same error on all processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from tests.ranks.loops import SETTINGS, Loop, Numbers, attempt, linear, loss_of, sgd, train, whole
from unisono.config import Settings
from unisono.environment import World
from unisono.plan.batch_order import BatchOrder
from unisono.testing import run_ranks
from unisono.train.run import Run
from unisono.train.step import Step

Round = Callable[[Step, nn.Module, torch.Tensor, torch.Tensor], Any]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Numbers())


class LongStream(Stream):
    def __len__(self) -> int:
        return 20


class Renormed(nn.Module):
    """A forward pass that changes a parameter: an embedding with max_norm."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(20, 3, max_norm=0.1)
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x + self.rows((x[:, 0] * 20).round().long()))
        return out


def hooked() -> nn.Module:
    model = linear()
    next(model.parameters()).register_post_accumulate_grad_hook(lambda p: None)
    return model


def clip_in_a_round(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
    whole(step, model, x, i)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def replace_in_a_round(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
    whole(step, model, x, i)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)


def zero_in_a_round(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
    model.zero_grad(set_to_none=False)
    whole(step, model, x, i)


def zero_on_one(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
    if not dist.is_initialized() or dist.get_rank() == 1:
        model.zero_grad(set_to_none=False)
    whole(step, model, x, i)


def halve_grad(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


def hook_in_a_round(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
    handle = next(model.parameters()).register_post_accumulate_grad_hook(halve_grad)
    whole(step, model, x, i)
    handle.remove()


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))


def sparse_adam(model: nn.Module) -> Any:
    return torch.optim.SparseAdam(model.parameters())


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def waiting() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(normed())


def with_body(body: Round, **more: Any) -> Loop:
    """Return the loop with another body for micro-batches."""
    return lambda run: train(run, body, **more)


def with_end(after: Callable[[Step, Any], Any], **more: Any) -> Loop:
    """Return the loop with another end of each step."""
    return lambda run: train(run, after=after, **more)


def with_loss(loss: Callable[[nn.Module, torch.Tensor], Any], weight: Any = 1) -> Loop:
    """Return the loop with another loss."""
    return with_body(lambda step, model, x, i: step.backward(loss(model, x), weight=weight))


def with_step(walk: Callable[[Step, nn.Module, Any], Any]) -> Loop:
    """Return the loop with another body for steps."""

    def loop(run: Run[Any]) -> None:
        model = run.place(linear)
        optimizer = sgd(model)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(Numbers()):
            walk(step, model, optimizer)

    return loop


def with_iterator(how: Callable[[Step], Any]) -> Loop:
    """Return the loop that iterates over a transformed step."""

    def walk(step: Step, model: nn.Module, optimizer: Any) -> None:
        for x, i in how(step):
            whole(step, model, x, i)
        step.update(optimizer)

    return with_step(walk)


def leave(step: Step, model: nn.Module, optimizer: Any) -> None:
    for x, i in step:
        whole(step, model, x, i)
        break


def leave_and_update(step: Step, model: nn.Module, optimizer: Any) -> None:
    leave(step, model, optimizer)
    step.update(optimizer)


def hold(step: Step, model: nn.Module, optimizer: Any) -> None:
    """Keep the iterator of a step."""
    optimizer.kept = iter(step)
    whole(step, model, *next(optimizer.kept))


def walk_twice(step: Step, model: nn.Module, optimizer: Any) -> None:
    for _ in range(2):
        for x, i in step:
            whole(step, model, x, i)


def walk_side_by_side(step: Step, model: nn.Module, optimizer: Any) -> None:
    for (x, i), _ in zip(step, step, strict=True):
        whole(step, model, x, i)


def twice(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
    whole(step, model, x, i)
    whole(step, model, x, i)


def update_early(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
    whole(step, model, x, i)
    step.update()


def update_twice(step: Step, optimizer: Any) -> None:
    step.update(optimizer)
    step.update(optimizer)


def norm_late(step: Step, optimizer: Any) -> float:
    step.update(optimizer)
    return step.grad_norm


def steps_twice(run: Run[Any]) -> None:
    train(run)
    run.steps(Numbers())


def optimizer_of_another_model(model: nn.Module) -> Any:
    other = nn.Linear(7, 7, bias=False)
    return torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)


def frozen(model: nn.Module) -> Any:
    return sgd(model.requires_grad_(False))


def lbfgs(model: nn.Module) -> Any:
    return torch.optim.LBFGS(model.parameters())


def fused_half(run: Run[Any]) -> Any:
    def body(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
        step.backward(model(x.bfloat16()).float().square().sum(), weight=len(i))

    return train(
        run,
        body,
        build=lambda: nn.Linear(3, 2).bfloat16(),
        make=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, fused=True),
    )


def plateau(step: Step, optimizer: Any) -> None:
    step.update(optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


def nan_loss(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
    step.backward(loss_of(model, x) * (torch.nan if 5 in i else 1.0), weight=len(i))


def nan_gradient(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
    """Return a finite loss with an infinite gradient: the derivative of sqrt at 0."""
    bad = torch.sqrt((model.get_parameter("weight") * 0.0).sum()) if 11 in i else 0.0
    step.backward(loss_of(model, x) + bad, weight=len(i))


def replaced_by_nan(step: Step, optimizer: Any) -> None:
    """Set a gradient to NaN between the micro-batches and the update, where users may change gradients."""
    p = optimizer.param_groups[0]["params"][0]
    p.grad = p.grad * torch.nan
    step.update(optimizer)


def set_to_inf(step: Step, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"][0].grad[0] = torch.inf
    step.update(optimizer)


def mean_entropy(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), (x[:, 0] > 0.5).long())


def measured(measure: Callable[..., Any], data: Any = None) -> Loop:
    return lambda run: run.evaluate(run.place(linear), Numbers() if data is None else data, measure)


class Breach(NamedTuple):
    """A loop that violates the contract, and a part of its error message."""

    loop: Loop
    words: str
    settings: Settings = SETTINGS


def need_group() -> None:
    """Let DistributedDataParallel be built on one process, which has no group."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def in_ddp(run: Run[Any]) -> None:
    need_group()
    DistributedDataParallel(nn.Sequential(run.place(linear())))


def place_ddp(run: Run[Any]) -> None:
    need_group()
    train(run, build=lambda: DistributedDataParallel(linear()))


def not_placed(run: Run[Any]) -> None:
    model = linear()
    for step in run.steps(Numbers()):
        for x, i in step:
            whole(step, model, x, i)


ONE = replace(SETTINGS, virtual_ranks=1)
MEAN = "a loss that is a mean.*use reduction=.*mean=True"
BREACHES = {
    # arguments of the run
    "no samples": Breach(
        lambda run: train(run, data=[]), "DataError: The training set has no samples.*length of the list is 0"
    ),
    "a stream": Breach(
        lambda run: train(run, data=Stream()), "DataError: The training set is not a map-style data set.*class Stream"
    ),
    "a stream with a length": Breach(
        lambda run: train(run, data=LongStream()), "DataError: .* not a map-style data set.*LongStream"
    ),
    "a loader": Breach(lambda run: train(run, data=DataLoader(Stream())), "a DataLoader.*loader.dataset.*--set batch"),
    "a generator": Breach(lambda run: train(run, data=iter([])), "DataError: .* list_iterator.*lacks __len__"),
    "nothing trains": Breach(lambda run: train(run, make=frozen), "none of the parameters needs a gradient"),
    "nothing placed": Breach(not_placed, "No model was placed.*model = run.place"),
    "another's parameters": Breach(
        lambda run: train(run, make=optimizer_of_another_model), r"1 of its .* shape \(7, 7\).*run\.place"
    ),
    "a closure": Breach(lambda run: train(run, make=lbfgs), "LBFGS.*no closure"),
    "16 bits in torch's fused SGD": Breach(fused_half, r"SGD\(fused=True\).*bfloat16.*fused=False"),
    "a plateau": Breach(with_end(plateau), "ReduceLROnPlateau.*schedule.step"),
    "a sparse optimizer": Breach(lambda run: train(run, make=sparse_adam), "SparseAdam.*of 4 virtual ranks.*AdamW"),
    "a lazy model": Breach(lambda run: train(run, build=lazy), r"2 of its .* no shape yet \(the first is 0.weight"),
    "a placed model in DDP": Breach(in_ddp, "Cannot wrap a placed Linear in DistributedDataParallel.*exchange=ddp"),
    "a placed model in DataParallel": Breach(
        lambda run: nn.DataParallel(run.place(linear())), "Cannot wrap a placed Linear in DataParallel"
    ),
    "DDP that is placed": Breach(place_ddp, r"a model that DistributedDataParallel wraps.*run\.place\(model\)"),
    "steps twice": Breach(steps_twice, "run.steps was called twice.*epochs=3"),
    # losses and gradients
    "cross entropy's mean": Breach(with_loss(mean_entropy), MEAN),
    "a mean of squares": Breach(with_loss(lambda m, x: F.mse_loss(m(x), x[:, :2])), MEAN),
    "a mean": Breach(with_loss(lambda m, x: m(x).mean()), MEAN),
    "minus a mean": Breach(with_loss(lambda m, x: -m(x).mean()), MEAN),
    "a mean in a sum": Breach(with_loss(lambda m, x: 0.1 * m(x).pow(2).sum() + (m(x).mean() + m(x).sum())), MEAN),
    "no graph": Breach(with_loss(lambda m, x: m(x).sum().detach()), r"without a graph.*torch\.no_grad"),
    "not one number": Breach(with_loss(lambda m, x: m(x).sum(1)), r"not one number.*\(2,\).*loss\.sum\(\)"),
    "no tensor": Breach(with_loss(lambda m, x: 0.5), "not one number.*It is float"),
    "no weight": Breach(with_loss(loss_of, 0), "total weight of its 8 samples .* is 0.*above 0"),
    "no backward": Breach(with_body(lambda *_: None), "is 0, since no round called step.backward"),
    "a loss of NaN": Breach(with_body(nan_loss), "Step [012] has a loss of nan.*virtual rank"),
    "a gradient of NaN": Breach(with_body(nan_gradient), r"not finite, with a loss of \d.*weight of shape \(2, 3\)"),
    "a gradient replaced": Breach(with_end(replaced_by_nan), "Step 0 has a gradient that is not finite.*weight"),
    "a gradient set": Breach(with_end(set_to_inf), "Step 0 has a gradient that is not finite.*weight.* 3 such"),
    # micro-batches
    "break": Breach(with_step(leave), "Step 0 was left with break.*use continue"),
    "break, then update": Breach(with_step(leave_and_update), "Step 0 was left with break.*use continue"),
    "some rounds": Breach(with_step(hold), "Step 0 was left with break.*use continue"),
    "list": Breach(with_iterator(list), "Step 0 was turned into a list"),
    "tuple": Breach(with_iterator(tuple), "Step 0 was turned into a list"),
    "a star": Breach(with_iterator(lambda step: [*step]), "Step 0 was turned into a list"),
    "a comprehension": Breach(with_iterator(lambda step: [batch for batch in step]), "no round called step.backward"),  # noqa: C416
    "the rounds twice": Breach(with_step(walk_twice), "Step 0 was iterated over twice"),
    "the rounds side by side": Breach(with_step(walk_side_by_side), "Step 0 was iterated over twice"),
    "backward twice": Breach(with_body(twice), "Step 0 got a second backward in one round"),
    "backward before": Breach(
        with_step(lambda s, m, o: s.backward(m(torch.ones(3)).sum(), 1)), "backward outside of its"
    ),
    "backward after": Breach(with_end(lambda s, o: s.backward(torch.ones(()), 1)), "backward outside of its rounds"),
    "add after": Breach(with_end(lambda s, o: s.add("x", 1)), "Step 0 cannot add 'x' outside of its inner loop"),
    "add by a taken name": Breach(with_body(lambda s, *_: s.add("loss", 1)), "cannot add a sum named 'loss'.*is taken"),
    "a batch norm over one sample": Breach(
        lambda run: train(run, build=normed),
        r"^unisono\.errors\.LoopError: The batch norm 1 of Sequential .*the last step of every epoch .*--set batch=10",
    ),
    "a batch norm that waits": Breach(
        lambda run: train(run, build=waiting), r"Its 1 is a SyncBatchNorm.*nn\.BatchNorm"
    ),
    "a forward that renorms": Breach(lambda run: train(run, build=Renormed), r"parameter rows\.weight of shape \(20"),
    "clipping in a round": Breach(with_body(clip_in_a_round), "changed between two micro-batches.*clip=1.0"),
    "a gradient replaced in a round": Breach(with_body(replace_in_a_round), "changed between two micro-batches"),
    "zeroes in a round": Breach(with_body(zero_in_a_round), "changed between two micro-batches.*set_to_none=False"),
    "zeroes on one process": Breach(with_body(zero_on_one), "changed between two micro-batches"),
    "a hook after accumulation": Breach(lambda run: train(run, build=hooked), "weight of shape .* has a hook"),
    "a hook in a round": Breach(with_body(hook_in_a_round), "changed between two micro-batches.*a hook"),
    # after the micro-batches
    "update twice": Breach(with_end(update_twice), "Step 0 was updated twice.*one step.update"),
    "update in a round": Breach(with_body(update_early), "Step 0 was updated too early"),
    "update alone": Breach(with_step(lambda s, m, o: s.update(o)), "Step 0 was updated without its rounds"),
    "no update": Breach(with_end(lambda s, o: 0), "Step 0 ended without an update"),
    "nothing at all": Breach(with_step(lambda s, m, o: 0), "Step 0 was skipped.*for batch in step"),
    "the loss too early": Breach(with_body(lambda s, *_: s.loss), "Step 0 has no loss yet"),
    "a name nobody added": Breach(with_end(lambda s, o: s.mean("hits")), "'hits'.*Its sums are: loss"),
    "the norm too late": Breach(with_end(norm_late), "Step 0 has no grad_norm now.*read it between"),
    # evaluation
    "measured as one number": Breach(measured(lambda out, x, i: out.sum()), r"returned Tensor.*return \(sum, weight\)"),
    "measured in a dict": Breach(measured(lambda out, x, i: {"hits": 3}), r"returned int for 'hits'.*return \(sum"),
    "measured without weight": Breach(measured(lambda out, x, i: (out.sum(), 0)), "of 10 micro-batches is 0"),
    "nothing to measure": Breach(measured(lambda *_: (0, 0), []), "data set of run.evaluate has no samples"),
    # one virtual rank on one process uses another code path with the same contract
    "alone: a loss of NaN": Breach(with_body(nan_loss), "Step [012] has a loss of nan", ONE),
    "alone: a gradient of NaN": Breach(with_body(nan_gradient), "weight of shape", ONE),
    "alone: a gradient replaced": Breach(with_end(replaced_by_nan), "weight of shape", ONE),
    "alone: a gradient set": Breach(with_end(set_to_inf), "weight of shape", ONE),
    "alone: no backward": Breach(with_body(lambda *_: None), "no round called step.backward", ONE),
    "alone: only an add": Breach(with_body(lambda s, *_: s.add("x", 1)), "no round called", ONE),
    "alone: break": Breach(with_step(leave), "Step 0 was left with break", ONE),
}


def without_folder(end: Any, folder: str) -> Any:
    """Return a result without the path of its run directory."""
    return end.replace(folder, "") if isinstance(end, str) else end


def run_breaches(world: World, folder: str) -> dict[str, Any]:
    return {
        name: without_folder(attempt(world, Path(folder, name), breach.loop, breach.settings), folder)
        for name, breach in BREACHES.items()
        if world.size <= breach.settings.virtual_ranks
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the result of each violation on one process and on two. Each one has its own process group."""
    return [end for size in (1, 2) for end in run_ranks(run_breaches, size, str(tmp_path_factory.mktemp("breaches")))]


@pytest.mark.ci
@pytest.mark.parametrize("breach", BREACHES)
def test_breach_raises_the_same_error_on_all_processes(results: list[dict[str, Any]], breach: str) -> None:
    first, *others = [end[breach] for end in results if breach in end]
    assert isinstance(first, str), f"it went on, and returned {first}"
    assert re.search(BREACHES[breach].words, first, re.DOTALL), first
    assert re.match(r"unisono\.errors\.(LoopError|NotFiniteError|DataError): ", first), first
    assert "\n  Next: " in first
    assert others == [first] * len(others)


def test_samples_with_nan_are_named(results: list[dict[str, Any]]) -> None:
    order = BatchOrder(length=20, batch=8, virtual_ranks=4, seed=2)
    (step, rank, samples), = (
        (step, rank, samples)
        for step in range(3)
        for rank in range(4)
        for samples in order.micro_batches(step, rank)
        if 5 in samples
    )  # fmt: skip
    words = f"Step {step} has a loss of nan.\n  It comes from virtual rank {rank} of 4 (samples {str(samples)[1:-1]})."
    assert words in results[0]["a loss of NaN"]


# -- correct loops


def with_batch_norm(run: Run[Any]) -> Any:
    return train(run, build=normed)


def sum_loss(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
    step.backward(F.mse_loss(model(x), x[:, :2], reduction="sum"), weight=2 * len(i))


def scaled_mean(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
    step.backward(F.mse_loss(model(x), x[:, :2]) * (2 * len(i)), weight=2 * len(i))


def stated_mean(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
    step.backward(F.mse_loss(model(x), x[:, :2]), weight=2 * len(i), mean=True)


def tensor_weight(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
    step.backward(F.mse_loss(model(x), x[:, :2]), weight=torch.tensor(2 * len(i)), mean=True)


def tensor_count(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
    step.backward(F.mse_loss(model(x), x[:, :2], reduction="sum").view(1), weight=torch.ones_like(x[:, :2]).sum())


WAYS: list[Round] = [sum_loss, scaled_mean, stated_mean, tensor_weight, tensor_count]


def run_all_bodies(world: World, folder: str) -> Any:
    return [attempt(world, Path(folder, body.__name__), lambda run, body=body: train(run, body)) for body in WAYS]  # type: ignore[misc]


def test_equivalent_losses_and_weights(tmp_path: Path) -> None:
    sums, times, means, means_by_tensor, by_tensor = run_ranks(run_all_bodies, 1, str(tmp_path))[0]
    assert sums == by_tensor
    assert times == means == means_by_tensor
    assert times[:-1] == pytest.approx(sums[:-1], rel=1e-6)


def test_batch_norm_with_one_virtual_rank_matches_plain_torch(tmp_path: Path) -> None:
    assert len(run_ranks(attempt, 1, tmp_path, with_batch_norm, ONE)[0]) == 4
