"""A dry run: report settings that do not fit the model before any process of the run starts.

The settings alone show most errors of a request. Other errors depend on the model: whether heads divide, whether the
layers are enough for the stages, whether gradients can be compressed. Only the script's own code builds the model.
Therefore one process executes the script up to its loop, in a group whose other processes do not exist
(distributed/fake_group.py), and places the model as the run will. If the dry run refuses a model, the run would have
refused it, too, on every process, after all of them had started.

A dry run has no other effect: it prints nothing, loads no checkpoint, is never the main process, and its evaluations
return nan. The run itself reports any other error.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch.utils.data import default_collate

from unisono.config import Settings
from unisono.config.validate import needs_dry_run
from unisono.data.loader import Collate, length_of
from unisono.data.rng import seed_everything
from unisono.distributed.fake_group import dry_run_group
from unisono.environment import World
from unisono.errors import LoopError, SettingsError
from unisono.exchange.choose import refuse_dtypes
from unisono.parallel.context_parallel.ulysses import ContextParallel
from unisono.plan.rng_keys import SCRIPT, mix
from unisono.train.context import build_context
from unisono.train.evaluation.model_call import Forward, call
from unisono.train.lifecycle import close
from unisono.train.loop import SyncLoop
from unisono.train.run import Run

S = TypeVar("S", bound=Settings)


class DryRunRefused(SettingsError):
    """The run would refuse this model."""


class LoopReached(BaseException):
    """The script has reached code that needs the other processes. It is not an Exception, so no script catches it."""


def dry_run(train: Callable[[Run[S]], None], settings: S, world: World) -> bool:
    """Execute `train` up to its loop, and return whether it got there. The run itself reports other errors.

    Raises:
        DryRunRefused: the run would refuse the model.
    """
    if not needs_dry_run(settings):
        return False
    folder = Path(world.dry, "run")
    folder.mkdir()
    with ExitStack() as kept:
        nowhere = kept.enter_context(open(os.devnull, "w", encoding="utf-8"))
        group = kept.enter_context(dry_run_group(world.size))
        loop = SyncLoop(settings, group)
        context = build_context(settings, loop, world=world, run_dir=folder, output=nowhere)
        context.models.context = _Attention(context.mesh.context)
        run: DryRun[S] = DryRun(context, loop)
        kept.callback(close, context)
        seed_everything(mix(settings.seed, SCRIPT))
        try:
            train(run)
        except LoopReached:
            return True
        except DryRunRefused:
            raise
        except Exception:
            pass
        return False


class DryRun(Run[S]):
    """The run, as its script sees it up to its loop."""

    @property
    def rank(self) -> int:
        return self.context.world.rank

    @property
    def is_main(self) -> bool:
        return False

    def place(self, model: Any, **more: Any) -> Any:
        more.pop("example", None)  # times of layers cannot make a run refuse a model
        with _refusing():
            placed = super().place(model, **more)
        if self.context.mesh.tensor.size > 1:
            placed.register_forward_pre_hook(_look, prepend=True, with_kwargs=True)
        return placed

    def track(self, **things: Any) -> None:
        """Do nothing: a dry run saves and loads nothing."""

    @contextmanager
    def first(self) -> Iterator[None]:
        yield

    def print(self, *values: Any) -> None:
        """Do nothing: a dry run has no output."""

    def log(self, values: Any = None, **named: Any) -> None:
        """Do nothing: a dry run has no output."""

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Return nan for every name, since a dry run computes nothing."""
        return _Unknown()

    def steps(self, data: Any = None, *, collate_fn: Collate | None = None, **_: Any) -> Iterator[Any]:
        """Yield the first step, which ends at its first forward pass."""

        def batch() -> Any:
            """Return the first micro-batch, if a model needs one."""
            if self.context.mesh.tensor.size == self.context.mesh.context.size == 1 or not hasattr(data, "__getitem__"):
                raise LoopReached
            share = -(-self.settings.batch // self.settings.virtual_ranks)
            samples = range(min(share, self.settings.micro_batch or share, length_of(data, "The training set")))
            many = hasattr(data, "__getitems__")
            rows = data.__getitems__(list(samples)) if many else [data[i] for i in samples]
            return (collate_fn or default_collate)(rows)

        yield _FirstStep(self, batch)
        raise LoopReached

    def _look_at_numbers(self, params: Iterable[torch.nn.Parameter]) -> None:
        with _refusing():
            refuse_dtypes(list(params), self.settings.compress)

    def _end(self, *_: Any, **__: Any) -> NoReturn:
        """End the dry run, because this call needs all processes."""
        raise LoopReached

    predict = _end
    collectives = property(_end)


class _Unknown(dict[str, float]):
    """Values of a dry run: nan, so that every comparison is false."""

    def __missing__(self, _: str) -> float:
        return math.nan


class _FirstStep:
    """A step of one micro-batch, which ends when the model is called. Trained parameters are read when it begins."""

    number = epoch = 0

    def __init__(self, run: DryRun[Any], batch: Callable[[], Any]) -> None:
        self._run, self._batch = run, batch

    def __iter__(self) -> Iterator[Any]:
        yield from self._rounds(self._run.context.models.params)

    def over(self, *optimizers: Any) -> Iterator[Any]:
        return self._rounds([p for o in optimizers for group in o.param_groups for p in group["params"]])

    def run(
        self, model: torch.nn.Module, _: Any, forward: Forward | None = None, over: Iterable[Any] = (), **__: Any
    ) -> NoReturn:
        for batch in self.over(*over) if over else self:
            (forward or call)(model, batch)
        raise LoopReached

    def _rounds(self, params: Iterable[torch.nn.Parameter]) -> Iterator[Any]:
        self._run._look_at_numbers(params)
        with self._run.context.models.context.part(self._batch()) as batch:
            yield batch
        raise LoopReached

    def __getattr__(self, _: str) -> NoReturn:
        raise LoopReached


class _Attention(ContextParallel):
    """Context parallelism of a dry run: the first attention call shows the number of heads."""

    def attend(self, query: Any, key: Any, *_: Any, **__: Any) -> NoReturn:
        with _refusing():
            self.check_shapes(query, key)
        raise LoopReached


def _look(model: torch.nn.Module, args: Any, kwargs: Any) -> NoReturn:
    """Check the heads of a model by its inputs when it is called, and end the dry run."""
    from unisono.parallel.tensor_parallel.tensor_parallel import ShardedForward  # the import takes 0.5 s

    found = inspect.unwrap(model.forward, stop=lambda forward: isinstance(forward, ShardedForward))
    if isinstance(found, ShardedForward):
        with _refusing():
            found.heads.check(args, kwargs)
    raise LoopReached


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except (LoopError, SettingsError) as error:
        raise DryRunRefused.of(error.problems) from error
