"""Causes of a broken promise: a name, a sentence and a remedy. `unisono check` uses the same names if it can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch


class Cause(NamedTuple):
    """name  for programs; `said` and `do` are for users."""

    name: str
    said: str
    remedy: str


STATE = Cause(
    "state",
    "State outside the model: something that micro-batches change (a counter, a list, a generator of the script's own) "
    "carries over from one to the next, and each process has only its own micro-batches.",
    "keep it in a buffer of the model or in step.add, or change it between two steps and track it",
)
UNKEYED = Cause(
    "unkeyed-loop",
    "Two computations one after the other, on one process, differ: randomness without the run's seed, or state that "
    "every call changes.",
    "draw from torch, numpy or random without generators of the script's own",
)
ALIGNMENT = Cause(
    "alignment",
    "A kernel whose rounding depends on where its data is in memory: the same values at another address give other "
    "bits.",
    "copy the batch in the loop: x = x.clone()",
)
PROCESS = Cause(
    "process",
    "It depends on the process: on what earlier micro-batches left behind there, or on its rank or size.",
    "let the loop depend on the batch, step.number and the settings only",
)
ORDER = Cause(
    "parameter-order",
    "The processes have their parameters in different orders: the model was built in the order of a set, say, and "
    "Python's hash of a text differs from process to process.",
    "build the model in a fixed order: sorted(names)",
)
BACKWARD = Cause(
    "backward",
    "The losses agree and the gradients differ: a hook or an autograd function with state of its own.",
    "let backward depend on its inputs only",
)
DATA = Cause(
    "data",
    "The data set gives other samples when it is read again: it keeps a counter or a generator of its own, or it "
    "depends on its process.",
    "draw from torch, numpy or random in __getitem__, and let it depend on the sample's number only",
)
WORKER = Cause(
    "worker",
    "The data set gives other samples in a loader worker than in the process itself.",
    "do not ask torch.utils.data.get_worker_info in it, and leave it as run.steps was given it",
)
EXCHANGE = Cause(
    "exchange",
    "The gradients of the micro-batches agree, and their sum is made in another order.",
    "use dense gradients (sparse=False) and --set exchange=tree",
)


def operators(names: Sequence[str]) -> Cause:
    """Return the cause: operators without a deterministic kernel."""
    return Cause(
        "operator",
        f"An operator without a deterministic kernel: {'; '.join(names)}.",
        "use another operator",
    )


def scripted(name: str) -> Cause:
    """Return the cause: a TorchScript function or module."""
    return Cause(
        "torchscript",
        f"{name} is compiled by torch.jit.script, whose executor computes other bits after its first calls.",
        "leave torch.jit.script out (torch.compile is its successor)",
    )


def compiled(name: str) -> Cause:
    """Return the cause: a module that torch.compile has compiled."""
    return Cause(
        "compile",
        f"{name} is compiled by torch.compile, which may compile again for shapes that a process sees first.",
        "use torch.compile(..., dynamic=False), or leave it out",
    )


def attribute(name: str) -> Cause:
    """Return the cause: a module that keeps state in a Python attribute."""
    return Cause(
        "attribute",
        f"A module keeps state in a Python attribute, which each process changes with its own micro-batches: {name}.",
        "keep it in a buffer (register_buffer), or compute it from the input",
    )


def optimizer(kind: Any) -> Cause:
    """Return the cause: an optimizer that updates rows with other bits than whole parameters."""
    options = [way for way in ("fused", "foreach") if any(group.get(way) for group in kind.param_groups)]
    how = f"{type(kind).__name__}({', '.join(f'{way}=True' for way in options)})"
    return Cause(
        "optimizer",
        f"{how} makes other bits of the rows that a process holds than of the whole parameter.",
        f"use {type(kind).__name__}({', '.join(f'{way}=False' for way in ('fused', 'foreach'))}) with float32 "
        "parameters, or --set parallel.shard=1",
    )


def part(where: str) -> Cause:
    """Return the cause: a script that reduces rows of a parameter."""
    return Cause(
        "part",
        f"The script computes with the rows of a parameter or gradient that a process holds as if they were all: "
        f"{where}.",
        "clip with step.update(optimizer, clip=...), ask step.grad_norm for the norm, or --set parallel.shard=1",
    )


def scripted_in(models: Sequence[torch.nn.Module]) -> str:
    """Return the name of a TorchScript function or module that these models use; "" if none is found."""
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                return name or type(model).__name__
            for known, value in (*_globals_of(module), *vars(module).items()):
                if isinstance(value, torch.jit.ScriptFunction):
                    return known
    return ""


def compiled_in(models: Sequence[torch.nn.Module]) -> str:
    """Return the name of a module that torch.compile has compiled; "" if none is found."""
    for model in models:
        for name, module in model.named_modules():
            if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
                return name or type(model).__name__
            for known, value in _globals_of(module):
                if callable(value) and hasattr(value, "_torchdynamo_orig_callable"):
                    return known
    return ""


def _globals_of(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the globals that the module's forward uses, by name."""
    forward = getattr(type(module), "forward", None)
    code, known = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    if code is None or str(known.get("__name__", "")).startswith("torch."):
        return
    for name in code.co_names:
        if name in known:
            yield name, known[name]
