"""A schedule of two of torch: a linear warm-up, then a cosine to 0.

rate |      .-'''-.
     |    .'       '.
     |  .'            '.
     |.'                 '-.._
     +----------------------------> steps
     0     warmup             total
"""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from unisono.errors import LoopError


def warmup_cosine(optimizer: torch.optim.Optimizer, *, warmup: int, total: int) -> SequentialLR:
    """Return a schedule that raises each group's learning rate linearly, and then lowers it to 0 along a cosine.

    It is a SequentialLR of LinearLR and CosineAnnealingLR. Groups keep the ratios of their learning rates. Step
    i < warmup has (i + 1) / (warmup + 1) of the rate.

    Args:
        optimizer: The optimizer, with the largest learning rate of each group.
        warmup: The number of steps of the warm-up.
        total: The number of all steps, as run.total_steps.

    Raises:
        LoopError: The warm-up has no steps, or leaves none for the cosine.
    """
    if not 1 <= warmup < total:
        raise LoopError(
            f"A warm-up of {warmup} steps does not fit a run of {total} steps.",
            "It takes at least one step, and the cosine after it another one.",
            f"pass 1 <= warmup < total, as warmup={max(total // 20, 1)}; without a warm-up use CosineAnnealingLR.",
        )
    rising = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
    falling = CosineAnnealingLR(optimizer, T_max=total - warmup)
    return SequentialLR(optimizer, [rising, falling], milestones=[warmup])
