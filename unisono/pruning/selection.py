"""Which parameters of a model are pruned, and which elements of a tensor have the lowest scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch

from unisono.errors import LoopError


def matrices(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the trainable floating-point parameters with at least two dims, by name. A tied one is there once."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad and p.is_floating_point() and p.dim() > 1}


def linear_weights(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the matrices that are weights of linear layers, by name."""
    ours = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    return {name: p for name, p in matrices(model).items() if id(p) in ours}


def choose(
    candidates: Mapping[str, torch.nn.Parameter], patterns: Sequence[str], model: torch.nn.Module
) -> dict[str, torch.nn.Parameter]:
    """Return the candidates whose name matches a pattern.

    Args:
        candidates: The parameters that can be pruned, by name.
        patterns: Names, in which `*` stands for any text.
        model: The model, for messages.

    Raises:
        LoopError: A pattern matches no candidate, or `patterns` is one text.
    """
    if isinstance(patterns, str):
        raise LoopError("names is one text.", f"It is {patterns!r}.", f"pass a list: names=[{patterns!r}].")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in candidates):
            raise LoopError(
                f"{type(model).__name__} has no parameter to prune that matches {pattern!r}.",
                f"{len(candidates)} can be pruned: {', '.join([*candidates][:5]) or 'none'}. "
                "Frozen parameters and those with fewer than two dims (biases, norms) are left out.",
                "name one of: [name for name, _ in model.named_parameters()].",
            )
    return {n: p for n, p in candidates.items() if any(fnmatchcase(n, pattern) for pattern in patterns)}


def lowest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return where a tensor has its `count` lowest scores, as bool of the same shape. Equal ones count by index.

    Args:
        scores: Numbers of any shape. nan counts as infinity.
        count: From 0 to the number of elements.
    """
    flat = scores.reshape(-1).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    if flat.device.type == "cpu":  # faster than sorting; torch has no deterministic kernel for it on GPUs
        border = flat.kthvalue(count).values
    else:
        border = flat.sort().values[count - 1]
    found = flat < border
    equal = (flat == border).nonzero().view(-1)
    found[equal[: count - int(found.sum())]] = True
    return found.view(scores.shape)


def lowest_of_fours(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return where each group of four along the last dim has its `count` lowest scores. Equal ones count by index.

    Args:
        scores: Numbers [..., 4 k]. nan counts as the highest.
        count: From 0 to 4.
    """
    groups = scores.unflatten(-1, (-1, 4))
    order = groups.sort(dim=-1, stable=True).indices
    found = torch.zeros_like(groups, dtype=torch.bool)
    return found.scatter_(-1, order[..., :count], True).flatten(-2)
