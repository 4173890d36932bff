"""Choose the back end of torch.nn.functional.scaled_dot_product_attention for the whole run.

The switches are those of torch.backends.cuda, which torch reads on the CPU as well. They hold for all code of the
process. A block `torch.nn.attention.sdpa_kernel` around a forward pass would not hold for a layer that is recomputed in
the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from unisono.errors import LoopError

cuda = torch.backends.cuda

SWITCHES: dict[str, tuple[Callable[[], bool], Callable[[bool], None]]] = {
    "math": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    "flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "memory_efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "cudnn": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
}
"""For each back end: whether it is enabled, and what enables it."""

ON_CPU = ("math", "flash")
"""The back ends that the CPU has."""

SIGNS = ("No available kernel", "No viable backend for scaled_dot_product_attention")


def use_attention(backend: str) -> Callable[[], None]:
    """Enable one back end only, and return a function that restores the present choice.

    Args:
        backend: A key of `SWITCHES`; "any": change nothing.
    """
    before = {name: enabled() for name, (enabled, _) in SWITCHES.items()} if backend != "any" else {}
    for name in before:
        SWITCHES[name][1](name == backend)

    def restore() -> None:
        for name, was_enabled in before.items():
            SWITCHES[name][1](was_enabled)

    return restore


def disabled_on_cpu() -> list[str]:
    """Return the back ends of the CPU that are switched off, by the setting or by the script."""
    return [name for name in ON_CPU if not SWITCHES[name][0]()]


@contextmanager
def name_missing_backend(backend: str) -> Iterator[None]:
    """Return a block that raises LoopError where the chosen back end cannot compute an attention."""
    try:
        yield
    except RuntimeError as error:
        if backend == "any" or not any(sign in str(error) for sign in SIGNS):
            raise
        raise LoopError(
            f"speed.attention={backend} cannot compute an attention of this model.",
            "The back end does not support its inputs: on the CPU, flash takes no dropout, and a last dimension "
            "with stride 1; on GPUs, masks, data types and head sizes have limits. torch warned of the cause.",
            "--set speed.attention=any",
        ).with_traceback(error.__traceback__) from None
