"""Checks of the objects that a script passes: models, losses, optimizers, schedules."""

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
    """Raise LoopError if a parameter of the model cannot be broadcast: it has no shape yet, or consists of tensors."""
    lazy = [name for name, p in model.named_parameters() if isinstance(p, torch.nn.UninitializedParameter)]
    if lazy:
        raise LoopError(
            f"Cannot place a {type(model).__name__} with uninitialized parameters.",
            f"{len(lazy)} of its parameters have no shape yet (the first is {lazy[0]}), so they cannot be broadcast.",
            "pass in_features, or pass a batch through it first: run.place(lambda: warmed_up(Net())).",
        )
    quantized = [name for name, p in model.named_parameters() if hasattr(p, "__tensor_flatten__") and not is_dtensor(p)]
    if quantized:
        kind = type(model.get_parameter(quantized[0])).__name__
        raise LoopError(
            f"Cannot place a {type(model).__name__} with parameters that consist of several tensors.",
            f"{len(quantized)} of its parameters are like that (the first is {quantized[0]}, a {kind}). They can be "
            "neither broadcast nor saved as one tensor.",
            "torchao.utils.unwrap_tensor_subclass(model) after get_peft_model: docs/guide/adapters.md#quantized-bases.",
        )


def check_loss(loss: Any, mean: bool) -> None:
    """Check a loss of the first step. A mistake in the loss occurs in every step.

    Args:
        loss: as the script has passed it.
        mean: whether the script says that it is a mean.

    Raises:
        LoopError: it is not one number, has no graph, or is a mean without `mean`.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise LoopError(
            "step.backward got a loss that is not one number.",
            f"It is {shape}.",
            'sum it: loss.sum(), or reduction="sum".',
        )
    if not loss.requires_grad:
        raise LoopError(
            "step.backward got a loss without a graph.",
            "It does not depend on any parameter that needs a gradient.",
            "search for torch.no_grad, .detach(), .item() or frozen parameters between the model and the loss.",
        )
    found = None if mean else _visible_mean(loss.grad_fn)
    if found:
        raise LoopError(
            "step.backward got a loss that is a mean.",
            f"It was computed by {found}; the step needs a sum, which it divides by the total weight.",
            'use reduction="sum" and weight=<number of summands>, or step.backward(loss, weight, mean=True).',
        )


def check_optimizer(optimizer: Any, trained: Sequence[torch.nn.Parameter], virtual_ranks: int) -> None:
    """Raise LoopError if step.update cannot step this optimizer, or if it has parameters of no placed model."""
    if isinstance(optimizer, torch.optim.SparseAdam) and virtual_ranks > 1:
        raise LoopError(
            "step.update cannot step SparseAdam.",
            f"It takes sparse gradients only, and those of {virtual_ranks} virtual ranks are added as dense ones.",
            "use AdamW, or --set virtual_ranks=1.",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise LoopError(
            "step.update cannot step LBFGS.",
            "It calls a closure several times a step, and a step here has one gradient.",
            "use an optimizer that takes no closure.",
        )
    if isinstance(optimizer, torch.optim.SGD) and any(map(_unmoved, optimizer.param_groups)):
        raise LoopError(
            "step.update cannot step SGD(fused=True).",
            "torch's fused kernel for CPUs leaves most elements of bfloat16 and float16 parameters as they are.",
            "use fused=False.",
        )
    ours = set(map(id, trained))
    strange = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad and id(p) not in ours]
    if strange:
        raise LoopError(
            f"step.update cannot step {type(optimizer).__name__}: it has parameters of no placed model.",
            f"{len(strange)} of its parameters belong to no placed model, so their gradients would not be "
            f"exchanged; the first has shape {tuple(strange[0].shape)}.",
            "create every model that trains with run.place, and the optimizer from the model it returns; let a model "
            "grow between two steps.",
        )


def _unmoved(group: Mapping[str, Any]) -> bool:
    """Return whether torch's fused SGD would not write to the parameters of this group.

    Its vectorized loop over numbers of 16 bits computes an update and does not store it (torch 2.13, on CPUs).
    """
    return bool(group.get("fused")) and any(p.device.type == "cpu" and p.dtype.itemsize == 2 for p in group["params"])


BY_ELEMENT = ["SGD", "ASGD", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "NAdam", "RAdam", "RMSprop", "Rprop"]
"""torch's optimizers that compute every element of a parameter from that element alone, so that parts can be stepped.
Adafactor and Muon do not: they compute with rows and whole matrices."""


def is_elementwise(optimizer: Any) -> bool:
    """Return whether an optimizer computes every element of a parameter from that element alone.

    It is known of torch's optimizers; others declare it with an attribute `by_element`.
    """
    said = getattr(optimizer, "by_element", None)
    if said is not None:
        return bool(said)
    step = inspect.unwrap(getattr(type(optimizer), "step", is_elementwise))  # torch wraps it
    return str(step.__module__).startswith("torch.optim.") and step.__qualname__.partition(".")[0] in BY_ELEMENT


def explain_step_error(optimizer: Any, error: RuntimeError | AssertionError) -> None:
    """Raise LoopError if an optimizer's step raised this error because it cannot step parts of parameters.

    An optimizer that is not elementwise computes with rows or whole matrices. torch can compute only some of these
    operations on DTensors.
    """
    first = str(error).partition("\n")[0] or "an assertion of torch.distributed.tensor failed."
    signs = ("Sharding propagation", "sharding strategy")
    if is_mixed_dtensor_error(error) or any(sign in str(error) for sign in signs) or _of_dtensor(error):
        raise LoopError(
            f"step.update cannot step {type(optimizer).__name__} with parameters of which each process has a part.",
            f"It computes with whole tensors in a way that torch does not support for parts of them: {first}",
            "use AdamW or SGD, which are elementwise, or --set parallel.shard=1 and parallel.tensor=1.",
        ) from error


def _of_dtensor(error: BaseException) -> bool:
    """Return whether an error is an assertion of torch's DTensor. Some have no text (Adafactor, resumed)."""
    *_, last = traceback.walk_tb(error.__traceback__)
    return isinstance(error, AssertionError) and last[0].f_globals["__name__"].startswith("torch.distributed.tensor")


def check_schedule(schedule: Any, settings: Settings) -> None:
    """Raise LoopError if step.update cannot step this schedule, or this pruning of weights."""
    if getattr(schedule, "needs_equal_weights", False):
        _check_equal_weights(type(schedule).__name__, settings)
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise LoopError(
            "step.update cannot step ReduceLROnPlateau.",
            "It needs a metric, which step.update does not have.",
            "call schedule.step(metric) yourself, with a value that is equal everywhere (run.evaluate's is).",
        )


def _check_equal_weights(name: str, settings: Settings) -> None:
    """Raise LoopError if some processes hold other parameters, or other values of them, than others after an update."""
    if settings.exchange in ("server", "local_sgd"):
        raise LoopError(
            f"{name} does not work with exchange={settings.exchange}.",
            "It changes weights after an update, and the processes do not all hold the same weights then.",
            "--set exchange=tree",
        )
    if settings.parallel.pipeline > 1:
        raise LoopError(
            f"{name} does not work with parallel.pipeline={settings.parallel.pipeline}.",
            "It changes all parameters of a model, and each process holds those of its stages.",
            "--set parallel.pipeline=1, with parallel.shard for a large model.",
        )


def _visible_mean(node: Any, depth: int = 8) -> str | None:
    """Return the operator that made a loss a mean, if it is the last operator, or in a term of a sum; else None."""
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
    """Return a block that raises LoopError where torch reports an operation on DTensors and plain tensors."""
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
            + ("a layer is gathered only while it computes." if by_layer else "parallel.tensor divides it."),
            ("--set parallel.reshard=step, with which it is whole for a step; or, " if by_layer else "")
            + "for a penalty on weights, the optimizer's weight_decay.",
        ).with_traceback(error.__traceback__) from None


def refuse_changing_buffers(step: int, samples: int, settings: Settings) -> None:
    """Raise LoopError where several processes compute the micro-batches of one virtual rank, and buffers change.

    Args:
        step: its number.
        samples: number of samples of the batch, in this step or the next one.
        settings: of the run.
    """
    share = -(-samples // settings.virtual_ranks)
    if share > (settings.micro_batch or share):
        raise LoopError(
            f"The forward pass of step {step} changed buffers (those of batch norm, for example).",
            f"With parallel.shard={settings.parallel.shard} and micro_batch={settings.micro_batch} a virtual rank's "
            f"{share} samples are computed by several processes, and its buffers pass from one micro-batch to the "
            "next.",
            "--set micro_batch=none, or --set parallel.reshard=step",
        )


def single_sample_error(order: BatchOrder, last: int, name: str) -> LoopError:
    """Return the error for a batch norm that gets a micro-batch of one sample in some step before `last`."""
    where = "every step" if min(order.sizes(0)) == 1 else f"the last step of every epoch of {order.length} samples"
    return LoopError(
        f"The batch norm {name} cannot normalize a micro-batch of one sample.",
        f"With batch={order.batch}, in {where} some of the {order.virtual_ranks} virtual ranks have a micro-batch of "
        "one sample, whose variance is not defined.",
        _better_batch(order, last),
    )


def _better_batch(order: BatchOrder, last: int) -> str:
    """Return the setting of the nearest batch size without a micro-batch of one sample."""
    known = range(2, 2 * (order.batch + order.virtual_ranks) + 1)
    for batch in sorted(known, key=lambda b: abs(b - order.batch)):
        if replace(order, batch=batch).smallest(last) > 1:
            return f"--set batch={batch}, or fewer virtual_ranks, or GroupNorm."
    for fewer in range(order.virtual_ranks - 1, 0, -1):
        if replace(order, virtual_ranks=fewer).smallest(last) > 1:
            return f"--set virtual_ranks={fewer}, or GroupNorm."
    return "use GroupNorm, or more data."


def refuse_hooks(trained: Sequence[torch.nn.Parameter], names: Mapping[int, str], virtual_ranks: int) -> None:
    """Raise LoopError for gradient hooks that would depend on the placement, or would not be called.

    A hook that runs after accumulation sees what this process has accumulated so far. torch does not call a hook of a
    divided parameter.
    """
    for p in trained:
        name = names.get(id(p), "A parameter")
        if p._backward_hooks and is_dtensor(p):
            raise LoopError(
                "A divided parameter has a gradient hook.",
                f"{name} has a gradient hook (register_hook), and this process holds a part of it, for which torch "
                "does not call the hook.",
                "change p.grad after the rounds: it is the mean over the batch then.",
            )
        if p._post_accumulate_grad_hooks and virtual_ranks > 1:
            raise LoopError(
                "A parameter has a hook that runs after accumulation.",
                f"{name} of shape {tuple(p.shape)} has a hook that runs after its gradient is accumulated, and the "
                "gradient accumulated until then depends on the placement.",
                "use p.register_hook (it sees one micro-batch's gradient), or change p.grad after the rounds.",
            )
