"""What a script may hand over that cannot work: a model, a loss, an optimizer, a schedule. Looked at when it comes."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from unisono.config import ParallelSettings, Settings
from unisono.distributed.process_group import is_dtensor, is_mixed_dtensor_error
from unisono.errors import LoopError
from unisono.plan.batch_order import BatchOrder


def check_shapes(model: torch.nn.Module) -> None:
    """Have all parameters a shape, so that they can be shared?"""
    lazy = [name for name, p in model.named_parameters() if isinstance(p, torch.nn.UninitializedParameter)]
    if lazy:
        raise LoopError(
            f"run.place was given a {type(model).__name__}.",
            f"{len(lazy)} of its parameters have no shape yet (the first is {lazy[0]}): there is nothing to share.",
            "say in_features, or let a batch through it before: run.place(lambda: warmed_up(Net())).",
        )


def check_loss(loss: Any, mean: bool) -> None:
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


def check_optimizer(optimizer: Any, trained: Sequence[torch.nn.Parameter], virtual_ranks: int) -> None:
    """Can this optimizer step here, and does it hold parameters of the run?"""
    if isinstance(optimizer, torch.optim.SparseAdam) and virtual_ranks > 1:
        raise LoopError(
            "step.update was given SparseAdam.",
            f"It takes sparse gradients only, and those of {virtual_ranks} virtual ranks are added up as dense ones.",
            "use AdamW, or --set virtual_ranks=1.",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise LoopError(
            "step.update was given LBFGS.",
            "It calls a closure several times a step, and a step here is one gradient.",
            "use an optimizer that takes no closure.",
        )
    if isinstance(optimizer, torch.optim.SGD) and any(map(_unmoved, optimizer.param_groups)):
        raise LoopError(
            "step.update was given SGD(fused=True).",
            "torch's fused kernel for CPUs leaves most elements of bfloat16 and float16 parameters as they are.",
            "use fused=False.",
        )
    ours = set(map(id, trained))
    strange = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad and id(p) not in ours]
    if strange:
        raise LoopError(
            f"step.update was given {type(optimizer).__name__}.",
            f"{len(strange)} of its parameters belong to no placed model, so their gradients would not be "
            f"exchanged; the first has shape {tuple(strange[0].shape)}.",
            "make every model that trains with run.place, and the optimizer from the model it returns; let a model "
            "grow between two steps.",
        )


def _unmoved(group: Mapping[str, Any]) -> bool:
    """Return whether torch's fused SGD would not write to the parameters of this group.

    Its vectorized loop over numbers of 16 bits computes an update and does not store it (torch 2.13, on CPUs).
    """
    return bool(group.get("fused")) and any(p.device.type == "cpu" and p.dtype.itemsize == 2 for p in group["params"])


BY_ELEMENT = ["SGD", "ASGD", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "NAdam", "RAdam", "RMSprop", "Rprop"]
"""torch's optimizers that treat every element of a parameter by itself, so that parts of it step as the whole would.
(Adafactor and Muon do not: they look at rows and at whole matrices.)"""


def is_elementwise(optimizer: Any) -> bool:
    """Does it treat every element by itself? Of torch's we know; others say so with an attribute of this name."""
    said = getattr(optimizer, "by_element", None)
    if said is not None:
        return bool(said)
    step = inspect.unwrap(getattr(type(optimizer), "step", is_elementwise))  # torch wraps it
    return str(step.__module__).startswith("torch.optim.") and step.__qualname__.partition(".")[0] in BY_ELEMENT


@contextmanager
def explain_step_errors(optimizer: Any) -> Iterator[None]:
    """An optimizer steps in here. Where it cannot do that to parts of parameters, that is told in our words.

    One that does not go element by element computes with rows or whole matrices; of these operations torch can make
    some of parts, and some not.
    """
    try:
        yield
    except (RuntimeError, AssertionError) as error:  # NotImplementedError is one of the first
        first = str(error).partition("\n")[0] or "an assertion of torch.distributed.tensor failed."
        signs = ("Sharding propagation", "sharding strategy")
        if not (is_mixed_dtensor_error(error) or any(sign in str(error) for sign in signs) or _of_dtensor(error)):
            raise
        raise LoopError(
            f"step.update was to step {type(optimizer).__name__} with parameters of which each process has a part.",
            f"It computes with whole tensors in a way that torch cannot do with parts of them: {first}",
            "use AdamW or SGD, which treat every element by itself, or --set parallel.shard=1 and parallel.tensor=1.",
        ) from error


def _of_dtensor(error: BaseException) -> bool:
    """Is it an assertion of torch's own code for tensors that are divided? Some have no text (Adafactor, resumed)."""
    *_, last = traceback.walk_tb(error.__traceback__)
    return isinstance(error, AssertionError) and last[0].f_globals["__name__"].startswith("torch.distributed.tensor")


def check_schedule(schedule: Any) -> None:
    """Can this schedule be stepped by step.update?"""
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise LoopError(
            "step.update was given ReduceLROnPlateau.",
            "It needs a metric, which step.update does not have.",
            "call schedule.step(metric) yourself, with a value that is equal everywhere (run.evaluate's is).",
        )


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


@contextmanager
def explain_dtensor_errors(parallel: ParallelSettings) -> Iterator[None]:
    """Where a part of a parameter meets a whole tensor, torch speaks of DTensors. Raises LoopError instead."""
    try:
        yield
    except AssertionError as error:
        if "does not support deepcopy" not in str(error):
            raise
        raise LoopError(
            "A placed model was copied (copy.deepcopy; AveragedModel does that).",
            "Each process has a part of it (parallel.shard), and torch does not copy parts.",
            "place the copy as well: average = run.place(build), average.load_state_dict(model.state_dict()), as "
            "docs/guide/buffers.md shows it; or --set parallel.shard=1.",
        ).with_traceback(error.__traceback__) from None
    except RuntimeError as error:
        if not is_mixed_dtensor_error(error):
            raise
        by_layer = parallel.shard != 1 and parallel.reshard == "layer"
        raise LoopError(
            "A parameter was used outside of its layer's call.",
            "Each process has a part of it there, since "
            + ("its layer is whole while it computes, and no longer." if by_layer else "parallel.tensor divides it."),
            ("--set parallel.reshard=step, with which it is whole for a step; or, " if by_layer else "")
            + "for a penalty on weights, the optimizer's weight_decay.",
        ).with_traceback(error.__traceback__) from None


def refuse_changing_buffers(step: int, samples: int, settings: Settings) -> None:
    """Raise LoopError where several processes compute the micro-batches of one virtual rank, and buffers change.

    samples  of the batch, in this step or the next one
    """
    share = -(-samples // settings.virtual_ranks)
    if share > (settings.micro_batch or share):
        raise LoopError(
            f"The forward pass of step {step} changed buffers (batch norm's, say).",
            f"With parallel.shard={settings.parallel.shard} and micro_batch={settings.micro_batch} a virtual rank's "
            f"{share} samples are computed by several processes, and its buffers go from one micro-batch to the "
            "next.",
            "--set micro_batch=none, or --set parallel.reshard=step",
        )


def single_sample_error(order: BatchOrder, last: int, name: str) -> LoopError:
    """A batch norm would have to normalise over one sample, in some step before `last`."""
    where = "every step" if min(order.sizes(0)) == 1 else f"the last step of every epoch of {order.length} samples"
    return LoopError(
        f"The batch norm {name} was to normalise micro-batches of a batch of {order.batch}.",
        f"In {where} some of the {order.virtual_ranks} virtual ranks have a micro-batch of one sample, whose "
        "variance says nothing.",
        _better_batch(order, last),
    )


def _better_batch(order: BatchOrder, last: int) -> str:
    """The nearest batch without a micro-batch of one sample, as a line to type."""
    known = range(2, 2 * (order.batch + order.virtual_ranks) + 1)
    for batch in sorted(known, key=lambda b: abs(b - order.batch)):
        if replace(order, batch=batch).smallest(last) > 1:
            return f"--set batch={batch}, or fewer --set virtual_ranks, or GroupNorm."
    for fewer in range(order.virtual_ranks - 1, 0, -1):
        if replace(order, virtual_ranks=fewer).smallest(last) > 1:
            return f"--set virtual_ranks={fewer}, or GroupNorm."
    return "use GroupNorm, or more data."


def refuse_hooks(trained: Sequence[torch.nn.Parameter], names: Mapping[int, str], virtual_ranks: int) -> None:
    """A hook that runs after accumulation sees whatever this process has added up so far; one of a parameter that is
    divided is never called."""
    for p in trained:
        name = names.get(id(p), "A parameter")
        if p._backward_hooks and is_dtensor(p):
            raise LoopError(
                "run.steps was asked for a step.",
                f"{name} has a gradient hook (register_hook), and this process holds a part of it, for which nobody "
                "calls it.",
                "change p.grad after the rounds: it is the mean over the batch then.",
            )
        if p._post_accumulate_grad_hooks and virtual_ranks > 1:
            raise LoopError(
                "run.steps was asked for a step.",
                f"{name} of shape {tuple(p.shape)} has a hook of its own that runs after its gradient is "
                "accumulated, and what has been accumulated then depends on the placement.",
                "use p.register_hook (it sees one micro-batch's gradient), or change p.grad after the rounds.",
            )
