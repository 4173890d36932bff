"""The learning rate for another batch size: linear for SGD, with the square root for Adam.

With k the new batch size over the old one:

    SGD    lr * k                                              Goyal et al. 2017, arXiv 1706.02677
    Adam   lr * sqrt(k), 1 - beta * k for both betas, eps / sqrt(k)   Malladi et al. 2022, arXiv 2205.10287

Both hold while noise dominates the gradient, so up to about the noise scale (docs/guide/batch-size.md).
"""

from __future__ import annotations

import math
from typing import TypedDict

from unisono.errors import LoopError


class AdamOptions(TypedDict):
    """Keyword arguments of torch.optim.Adam and AdamW."""

    lr: float
    betas: tuple[float, float]
    eps: float


def linear_scaling(lr: float, *, batch: int, base_batch: int) -> float:
    """Return the learning rate of SGD for another batch size: proportional to it (Goyal et al. 2017).

    Args:
        lr: The learning rate at `base_batch`.
        batch: The number of samples of a step.
        base_batch: The number of samples of a step for which `lr` is right.

    Raises:
        LoopError: A batch has less than one sample.
    """
    return lr * _ratio(batch, base_batch)


def sqrt_scaling(lr: float, *, batch: int, base_batch: int) -> float:
    """Return the learning rate of Adam for another batch size: with its square root (Malladi et al. 2022).

    For large changes scale the other options, too: see `sqrt_scaling_adam`. The arguments are those of
    `linear_scaling`.

    Raises:
        LoopError: A batch has less than one sample.
    """
    return lr * math.sqrt(_ratio(batch, base_batch))


def sqrt_scaling_adam(
    *, lr: float, batch: int, base_batch: int, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> AdamOptions:
    """Return lr, betas and eps of Adam or AdamW for another batch size (Malladi et al. 2022, definition 5).

    Adam then follows the same path in as many samples: its averages are over as many samples as before.

    Args:
        lr: The learning rate at `base_batch`.
        batch: The number of samples of a step.
        base_batch: The number of samples of a step for which the options are right.
        betas: The betas at `base_batch`.
        eps: The eps at `base_batch`.

    Raises:
        LoopError: A batch has less than one sample, or a beta becomes negative because the batch is too large.
    """
    ratio = _ratio(batch, base_batch)
    scaled = [1 - ratio * (1 - beta) for beta in betas]
    if min(scaled) < 0:
        largest = math.floor(base_batch / (1 - min(betas)))
        raise LoopError(
            f"The betas {betas} cannot be scaled from a batch of {base_batch} to {batch} samples.",
            f"They would become ({scaled[0]:g}, {scaled[1]:g}): one step has more samples than their average.",
            f"use a batch of at most {largest}, or scale the learning rate alone: unisono.scaling.sqrt_scaling.",
        )
    return {"lr": lr * math.sqrt(ratio), "betas": (scaled[0], scaled[1]), "eps": eps / math.sqrt(ratio)}


def _ratio(batch: int, base_batch: int) -> float:
    if batch < 1 or base_batch < 1:
        raise LoopError(
            "A learning rate cannot be scaled to this batch size.",
            f"It is given as batch={batch} and base_batch={base_batch}, in samples of a step.",
            "pass run.settings.batch, and the batch size for which the learning rate was found.",
        )
    return batch / base_batch
