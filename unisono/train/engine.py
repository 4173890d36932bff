"""The engine behind `run.steps`: fetches, seeds, exchanges, and tells what does not fit. One for each run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from unisono.data.loader import Loader, Schedule
from unisono.data.seeding import Generators, seed_everything
from unisono.errors import DataError, LoopError
from unisono.exchange import Exchange, build_exchange
from unisono.exchange.buckets import finite
from unisono.score.keys import STEP, UPDATE, mix
from unisono.score.order import Order, Place
from unisono.train.table import LOSS, Table

if TYPE_CHECKING:
    from unisono.settings import Settings
    from unisono.train.step import Step
    from unisono.world.collectives import Group


class Engine:
    """What a step needs from the run, in one place."""

    exchange: Exchange

    def __init__(
        self,
        settings: Settings,
        group: Group,
        order: Order,
        loader: Loader,
        schedule: Schedule,
        modules: Sequence[torch.nn.Module],
        names: dict[int, str],
        last: int,
        table: Table,
        generators: Generators,
    ) -> None:
        self.settings, self.group, self.order = settings, group, order
        self.schedule, self.modules, self.names, self.last = schedule, modules, names, last
        self.table = table
        self.generators = generators
        self.seen_backward = False
        self.asked = {"stop": False, "leave": False}
        self.agreed: Mapping[str, int] = self.asked
        self.steppers: list[Any] = []
        self._held: dict[int, int] = {}  # how many parameters each optimizer had when we looked
        self.params: list[torch.nn.Parameter] = []
        self._buffers: list[tuple[str, dict[str, torch.Tensor | None], str]] = []  # name, who holds it, as what
        self._before: Written = []  # the buffers and parameters, when the step began
        self._given: Written = []  # the gradients, when they were whole
        self._finite = True  # were they?
        self._begun = False
        self._known_pieces: dict[tuple[int, tuple[int, int]], dict[int, int]] = {}
        self._everything = _parameters(modules)
        self._grew = True  # some module somewhere was given a parameter or another module since we looked
        self._counted = len(modules)
        self._notices = [
            register_module_module_registration_hook(self._notice),
            register_module_parameter_registration_hook(self._notice),
        ]
        self._signature: list[bool] = []
        self._batches = iter(loader)
        self._step_key = mix(order.seed, STEP)
        self._update_key = mix(order.seed, UPDATE)
        self._accelerator = group.device if group.device.type != "cpu" else None
        self._token = torch.zeros(1, device=group.device)

    # -- a step

    def before_step(self, step: int) -> None:
        """Seed for what the loop does before its rounds: the same on every process, and after a resume.

        With one virtual rank there is one stream of random numbers, as in plain torch, and the checkpoint keeps it.
        """
        if self.order.virtual_ranks == 1:
            began, self._begun = self._begun, True
            if began or self.generators.give():
                return
        seed_everything(mix(self._step_key, step), self._accelerator)

    def micro_batches(self, step: int) -> Iterator[tuple[Place, Any, bool]]:
        """(place, batch, is it this process's last of the step) for every micro-batch of this process in `step`."""
        self._build_exchange()
        spans = self.schedule.at(step)
        pieces = self._pieces(step, spans[self.group.rank])
        self.exchange.begin(spans, pieces)
        self._before = self._state_of_forward()
        for left in range(sum(pieces.values()), 0, -1):
            try:
                place, batch = next(self._batches)
            except StopIteration:
                raise DataError(
                    f"Step {step} was asked for its micro-batches.", "The data set ended early.", "check its __len__."
                ) from None
            assert place.step == step
            yield place, batch, left == 1

    def _pieces(self, step: int, span: tuple[int, int]) -> dict[int, int]:
        """How many micro-batches each virtual rank of the span has in `step`: only the size of the batch decides."""
        known = self._known_pieces.get((size := self.order.batch_size(step), span))
        if known is None:
            known = {v: len(self.order.micro_bounds(step, v)) for v in range(*span)}
            self._known_pieces[size, span] = known
        return known

    def meet(self, step: Step) -> dict[str, tuple[float, float]]:
        """The step's sums over all processes; when it returns, p.grad is the mean gradient everywhere."""
        exchange, several = self.exchange, self.group.size > 1
        exchange.launch()
        self._check_forward(step)
        self.seen_backward = True
        totals = self.table.meet({**self.asked, "unused": not all(exchange.used)})
        self.agreed = totals.flags
        self._check_totals(step, *totals.sums.get(LOSS, (0.0, 0.0)), totals.losses)
        finite = exchange.finish(totals.sums[LOSS][1])
        if totals.flags["unused"]:
            used = torch.tensor(exchange.used, dtype=torch.uint8, device=self.group.device)
            for p, by_anyone in zip(self.params, self.group.max_(used).tolist(), strict=True):
                if not by_anyone:
                    p.grad = None  # as in plain torch
        if several:  # nobody finishes this unless everybody holds the whole gradient
            self._token.fill_(not finite)
            finite = self.group.sum_(self._token).item() == 0.0
        exchange.commit()
        self._finite = finite
        self._given = _written([p.grad for p in self.params])
        if self.order.virtual_ranks > 1:  # what comes now (noise on p.grad, say) must not depend on who computed what
            seed_everything(mix(self._update_key, step.number), self._accelerator)
        return totals.sums

    def _build_exchange(self) -> None:
        """The exchange over the parameters that train now; a new one when some were frozen or unfrozen, or are new."""
        if self._grew or len(self.modules) != self._counted:
            self._grew, self._counted = False, len(self.modules)
            self._look_again()
        signature = [p.requires_grad for p in self._everything]
        if signature and signature == self._signature:
            return
        if not any(signature):
            placed = f"{len(self.modules)} models were placed, and none of their parameters needs a gradient."
            raise LoopError(
                "run.steps was asked for a step.",
                placed if self.modules else "No model was placed, so there is nothing to train.",
                "place the model that trains: model = run.place(lambda: Net()).",
            )
        if self._signature:
            self.exchange.close()
        self._signature = []
        self.params = [p for p in self._everything if p.requires_grad]
        self._refuse_hooks()
        self.exchange = build_exchange(self.settings.exchange, self.params, self.order.virtual_ranks, self.group)
        self._signature = signature

    def _notice(self, *_: Any) -> None:
        """torch calls this whenever a module, any module, is given a parameter or a module."""
        self._grew = True

    def _look_again(self) -> None:
        """The modules may have grown between two steps: what is new is the main process's, as with run.place."""
        known = {id(p) for p in self._everything}
        self._everything = _parameters(self.modules)
        new = [p for p in self._everything if id(p) not in known]
        if new:
            self.group.share_(new)
            self._signature = [*self._signature, True]  # not what it was, so the exchange is built anew
        self.names |= {id(p): name for m in self.modules for name, p in m.named_parameters()}
        self._buffers = [
            (f"{prefix}.{name}".lstrip("."), part._buffers, name)
            for m in self.modules
            for prefix, part in m.named_modules()
            for name in part._buffers
        ]

    def close(self) -> None:
        """Let go of the parameters and of torch's hooks; closing twice changes nothing."""
        notices, self._notices = self._notices, []
        for notice in notices:
            notice.remove()
        if self._signature:
            self._signature = []
            self.exchange.close()

    # -- what does not fit

    def _refuse_hooks(self) -> None:
        """A hook that runs after accumulation sees whatever this process has added up so far."""
        if self.order.virtual_ranks == 1:
            return
        for p in self.params:
            if p._post_accumulate_grad_hooks:
                raise LoopError(
                    "run.steps was asked for a step.",
                    f"{self.names.get(id(p), 'A parameter')} of shape {tuple(p.shape)} has a hook of its own that runs "
                    "after its gradient is accumulated, and what has been accumulated then depends on the placement.",
                    "use p.register_hook (it sees one micro-batch's gradient), or change p.grad after the rounds.",
                )

    def check_first_loss(self, loss: Any, mean: bool) -> None:
        """The first step's losses are looked at closely: the mistakes that are made are made in every step."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise LoopError(
                "step.backward was given a loss that is not one number.",
                f"It is {shape}.",
                'sum it: loss.sum(), or reduction="sum".',
            )
        if not loss.requires_grad:
            raise LoopError(
                "step.backward was given a loss without a graph.",
                "It does not depend on any parameter that needs a gradient.",
                "look for torch.no_grad, .detach(), .item() or frozen parameters between the model and the loss.",
            )
        found = None if mean else _visible_mean(loss.grad_fn)
        if found:
            raise LoopError(
                "step.backward was given a loss that is a mean.",
                f"It was made by {found}; the step needs a sum, to divide by the total weight itself.",
                'use reduction="sum" and weight=<how many it sums>, or say step.backward(loss, weight, mean=True).',
            )

    def _check_totals(self, step: Step, loss: float, weight: float, losses: list[float]) -> None:
        if not weight > 0:
            raise LoopError(
                f"Step {step.number} was to be divided by its total weight.",
                f"The total weight of its {step.samples} samples over all processes is {weight:g}"
                + (", since no round called step.backward." if weight == 0 else "."),
                "call step.backward(loss, weight) in `for batch in step:` with a weight above 0 in some round.",
            )
        if not math.isfinite(loss):
            bad = [v for v, row in enumerate(losses) if not math.isfinite(row)]
            raise LoopError(
                f"Step {step.number} has a loss of {loss}.",
                f"It comes from virtual rank {bad[0]} of {self.order.virtual_ranks}"
                f" (samples {self._samples(step.number, bad[0])}).",
                "look at these samples, lower the learning rate, or clip the gradient (--set clip=1.0).",
            )

    def _samples(self, step: int, virtual_rank: int) -> str:
        samples = [i for micro_batch in self.order.micro_batches(step, virtual_rank) for i in micro_batch]
        return ", ".join(map(str, samples[:8])) + (f", ... {len(samples)} in all" if len(samples) > 8 else "")

    def check_finite(self, step: Step) -> None:
        """Refuse a gradient that is not finite, naming the first parameter that has it."""
        given, self._given = self._given, []
        # the exchange knows what it has made, but not what the loop has put there since
        if self._finite and _marks(given) == _marks(_written([p.grad for p in self.params])):
            return
        for p in self.params:
            if p.grad is not None and not finite(p.grad):
                raise LoopError(
                    f"Step {step.number} has a gradient that is not finite, with a loss of {step.loss:g}.",
                    f"{self.names.get(id(p), 'A parameter')} of shape {tuple(p.shape)} is the first that has "
                    f"{int((~torch.isfinite(p.grad.to_dense())).sum())} such elements.",
                    "look for a division by zero, sqrt or log at 0 behind that parameter, or lower the learning rate.",
                )

    def know(self, optimizer: Any) -> None:
        """Look at an optimizer when it is first stepped: can it step here, and does it hold parameters of the run?"""
        count = sum([len(group["params"]) for group in optimizer.param_groups])
        if self._held.get(id(optimizer)) == count:
            return
        if isinstance(optimizer, torch.optim.SparseAdam) and self.order.virtual_ranks > 1:
            raise LoopError(
                "step.update was given SparseAdam.",
                f"It takes sparse gradients only, and those of {self.order.virtual_ranks} virtual ranks are added up "
                "as dense ones.",
                "use AdamW, or --set virtual_ranks=1.",
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise LoopError(
                "step.update was given LBFGS.",
                "It calls a closure several times a step, and a step here is one gradient.",
                "use an optimizer that takes no closure.",
            )
        ours = {id(p) for p in self.params}
        strange = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad and id(p) not in ours]
        if strange:
            raise LoopError(
                f"step.update was given {type(optimizer).__name__}.",
                f"{len(strange)} of its parameters belong to no placed model, so their gradients would not be "
                f"exchanged; the first has shape {tuple(strange[0].shape)}.",
                "make every model that trains with run.place, and the optimizer from the model it returns; let a model "
                "grow between two steps.",
            )
        if id(optimizer) not in self._held:
            self.steppers.append(optimizer)
        self._held[id(optimizer)] = count

    def know_schedule(self, schedule: Any) -> None:
        """Look at a schedule when it is first stepped."""
        if any(known is schedule for known in self.steppers):
            return
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise LoopError(
                "step.update was given ReduceLROnPlateau.",
                "It needs a metric, which step.update does not have.",
                "call schedule.step(metric) yourself, with a value that is equal everywhere (run.evaluate's is).",
            )
        self.steppers.append(schedule)

    def _state_of_forward(self) -> Written:
        """What forward reads and must not change; with one virtual rank it may, as in plain torch."""
        if self.order.virtual_ranks == 1:
            return []
        return _written([*(held.get(key) for _, held, key in self._buffers), *self._everything])

    def _check_forward(self, step: Step) -> None:
        """What forward changes is state outside the tree."""
        if not self._before:
            return
        after = self._state_of_forward()
        if _marks(self._before) == _marks(after):
            return
        changed = next(i for i, (a, b) in enumerate(zip(_marks(self._before), _marks(after), strict=True)) if a != b)
        tensor = after[changed][0]
        if changed < len(self._buffers):
            what = f"buffer {self._buffers[changed][0]}"
            true = "buffers that change (batch norm's running statistics) are not carried yet."
            do = "use a norm without running statistics (GroupNorm, LayerNorm), or --set virtual_ranks=1."
        else:
            what = f"parameter {self.names.get(id(tensor), '')}"
            true = "parameters may change between two steps only."
            do = "do it after step.update (Embedding without max_norm, and a line that renorms), or "
            do += "--set virtual_ranks=1."
        shape = "None" if tensor is None else f"shape {tuple(tensor.shape)}"
        raise LoopError(
            f"The forward pass of step {step.number} changed the {what} of {shape}.",
            f"With {self.order.virtual_ranks} virtual ranks its value would depend on which process did what; {true}",
            do,
        )


Written = list[tuple[torch.Tensor | None, int]]
"""Some tensors, and how often each had been written to: what tells that one was changed, or replaced."""


def _parameters(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Each once."""
    return list({id(p): p for m in modules for p in m.parameters()}.values())


def _written(tensors: Iterable[torch.Tensor | None]) -> Written:
    return [(tensor, 0 if tensor is None else tensor._version) for tensor in tensors]


def _marks(written: Written) -> list[tuple[int, int]]:
    """To compare by: which tensors (they are alive, so no two are at one address) and how often written to."""
    return [(id(tensor), version) for tensor, version in written]


def _visible_mean(node: Any, depth: int = 8) -> str | None:
    """The name of the operator that made a loss a mean, where it shows: at its end, or in a term of a sum."""
    if node is None or depth == 0:
        return None
    name = node.name().removesuffix("0").removesuffix("Backward")
    if name.startswith("Mean") or getattr(node, "_saved_reduction", None) == 1:
        return f"{name}, whose reduction is 'mean'"
    if name.startswith(("Add", "Sub", "Neg", "ToCopy", "View", "Squeeze", "Reshape")):
        return next((f for n, _ in node.next_functions if (f := _visible_mean(n, depth - 1))), None)
    return None
