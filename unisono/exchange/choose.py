"""Build the exchange that the settings choose, and return its promise."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from unisono.config.exchange_registry import EXCHANGES
from unisono.distributed.process_group import ProcessGroup, is_dtensor
from unisono.errors import LoopError
from unisono.exchange.base import Exchange
from unisono.tensors.spec import dtype_name

if TYPE_CHECKING:
    from unisono.config import CompressSettings, Settings

SINGLE = "unisono.exchange.single:SingleProcess"
"""The exchange of one virtual rank on one process, which has nothing to exchange."""


def exchange_class(target: str) -> Any:
    """Return the class called "module:Class"."""
    module, name = target.split(":")
    return getattr(importlib.import_module(module), name)


def _target(settings: Settings) -> str:
    """Return the class that the settings choose for more than one process."""
    info = EXCHANGES[settings.exchange]
    if settings.balance.work_stealing:
        return info.work_stealing
    return info.target if settings.compress.kind == "none" else info.compressed


def choose_exchange(
    settings: Settings, params: Sequence[torch.nn.Parameter], group: ProcessGroup, world: ProcessGroup | None = None
) -> Exchange:
    """Build the exchange that the settings choose, over these parameters.

    Args:
        settings: The settings of the run.
        params: The parameters.
        group: The processes that average their gradients.
        world: All processes of the run; by default `group`.
    """
    ranks, target, info = settings.virtual_ranks, _target(settings), EXCHANGES[settings.exchange]
    arguments = _arguments(settings, world or group)

    def uncompressed() -> Exchange:
        return build_exchange(info.target, params, ranks, group, **arguments)

    def chosen() -> Exchange:
        more = {"settings": settings.compress} if target == info.compressed else arguments
        return build_exchange(target, params, ranks, group, **more)

    if target != info.compressed or not settings.compress.start_step:
        return chosen()
    from unisono.exchange.wrappers.warmup import WarmupExchange

    return WarmupExchange(params, uncompressed(), exchange_class(target), chosen, settings.compress.start_step)


def _arguments(settings: Settings, world: ProcessGroup) -> dict[str, Any]:
    """Return what the class of an exchange is given besides parameters, virtual ranks and the group."""
    known = {"world": world, "settings": getattr(settings, settings.exchange, None)}
    return {name: known[name] for name in EXCHANGES[settings.exchange].arguments}


def exchange_after_death(
    settings: Settings, params: Sequence[torch.nn.Parameter], group: ProcessGroup, world: ProcessGroup | None = None
) -> Exchange:
    """Build the exchange with which the survivors of a death continue the step."""
    if target := EXCHANGES[settings.exchange].after_death:
        return build_exchange(target, params, settings.virtual_ranks, group, **_arguments(settings, world or group))
    return choose_exchange(settings, params, group, world)


def survives(settings: Settings) -> bool:
    """Return whether survivors of a death can repeat a step under the exchange that the settings choose."""
    return bool(EXCHANGES[settings.exchange].after_death) and settings.compress.kind == "none"


def build_exchange(
    target: str, params: Sequence[torch.nn.Parameter], virtual_ranks: int, group: ProcessGroup, **more: Any
) -> Exchange:
    """Build the exchange called "module:Class" over these parameters; one virtual rank on one process needs none."""
    if virtual_ranks == group.size == 1 and not any(map(is_dtensor, params)):
        target, more = SINGLE, {}
    exchange: Exchange = exchange_class(target)(params, virtual_ranks, group, **more)
    return exchange


def refuse_hook(name: str) -> None:
    """Raise LoopError if the exchange called `name` does not support communication hooks."""

    def supports(exchange: str) -> bool:
        return hasattr(exchange_class(EXCHANGES[exchange].target), "register_comm_hook")

    if not supports(name):
        others = [f"--set exchange={other}" for other in EXCHANGES if supports(other)]
        raise LoopError(
            f"run.register_comm_hook does not work with exchange={name}.",
            "It has no bucket that torch would pass to a hook.",
            " or ".join(others) + ", or remove the call.",
        )


def refuse_dtypes(params: Sequence[torch.nn.Parameter], compress: CompressSettings) -> None:
    """Raise LoopError if gradients of these parameters cannot be compressed as the settings ask.

    Integers count even when they are frozen, as in torch: a script that passes them on expects them to be trained.
    Quantized weights under a trained adapter are not passed on where a pass names its optimizers.
    """
    integers = [p for p in params if not (p.is_floating_point() or p.is_complex())]
    refused = integers or [p for p in params if p.requires_grad and p.dtype != torch.float32]
    if compress.kind == "none" or not refused:
        return
    if integers:
        why = "integers have no gradient"
        do = "keep them in buffers (register_buffer), or name what trains: step.run(..., over=[optimizer])"
    else:
        why = "other dtypes would lose too much"
        do = "keep parameters in float32 (--set precision=bf16 computes in fewer bits)"
    dtype = dtype_name(refused[0].dtype)
    raise LoopError(
        f"compress.kind={compress.kind} does not support {dtype} parameters.",
        f"{len(refused)} of {len(params)} parameters are {dtype}. Only float32 gradients are compressed: {why}.",
        f"--set compress.kind=none, or {do}.",
    )


def promise_of(settings: Settings, size: int) -> tuple[str, str]:
    """Return what the exchange that the settings choose promises on `size` processes, and why."""
    kind = exchange_class(SINGLE if settings.virtual_ranks == size == 1 else _target(settings))
    return kind.promise, kind.reason
