"""Check that attention has heads of the same width with divided matrices as in the whole model.

Code that counts all heads, `q.view(batch, length, self.heads, -1)`, also runs with half of the features: it finds as
many heads that are half as wide, and computes another model without an error. So before the first forward pass, two
copies of the model without data (on torch's meta device) get the shapes of its inputs: one as it was, and one whose
matrices have the sizes of this process's parts. Products within heads must have the same sizes in both:

    whole    q [b, 4 heads, t, 8]  k [b, 4, t, 8]        divided   q [b, 2 heads, t, 8]  the same model
                                                                   q [b, 4 heads, t, 4]  another model

A forward that cannot run without data (it branches on a value) is not checked. Nothing is computed, and the state of
the random number generators is restored.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from unisono.errors import LoopError
from unisono.torch_compat.modules import forward_hooks_of

Sizes = list[tuple[int, ...]]
"""The sizes of every product within heads, in order, that do not depend on the number of heads."""


class HeadCheck:
    """Compare two copies of a model before its first forward pass.

    Args:
        model: The whole model.
        divided: The modules that will be divided: the name, and the dim of the weight (0: outputs, 1: inputs).
        size: The number of processes on the axis.
    """

    def __init__(self, model: nn.Module, divided: Iterable[tuple[str, int]], size: int) -> None:
        self.kind, self.size = type(model).__name__, size
        self.copies: tuple[nn.Module, nn.Module] | None = None
        try:
            self.copies = _meta_copy(model), _meta_copy(model)
        except Exception:  # a part of it cannot be copied
            return
        for name, dim in divided:
            part = self.copies[1].get_submodule(name)
            for key, p in list(part.named_parameters(recurse=False)):
                if p.dim() > dim:
                    setattr(part, key, nn.Parameter(p[: len(p) // size] if dim == 0 else p[:, : p.shape[1] // size]))

    def check(self, args: Any, kwargs: Any) -> None:
        """Compare once, with the first inputs that have a tensor. Raise LoopError if it would be another model."""
        if self.copies is None or not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs))):
            return
        (whole, divided), self.copies = self.copies, None
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            expected, _ = _products(whole, args, kwargs)
            found, problem = _products(divided, args, kwargs) if expected is not None else (None, "")
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])
        if expected is not None and not _agree(expected, found):
            raise self._error(expected, found, problem)

    def _error(self, expected: ProductMode, found: ProductMode | None, problem: str) -> LoopError:
        uneven = next((heads for heads in expected.heads if heads % self.size), None)
        if uneven is not None:
            fewer = max(n for n in range(1, self.size) if uneven % n == 0)
            return LoopError(
                f"A {self.kind} cannot be divided with parallel.tensor={self.size}: its heads do not divide evenly.",
                f"Its attention has {uneven} heads, and each process computes whole ones: {uneven} is no multiple of "
                f"{self.size}.",
                f"--set parallel.tensor={fewer if fewer > 1 else uneven}, or another number of heads.",
            )
        if found is None:
            fact = f"With a part of its matrices, its forward pass fails: {problem}"
        else:
            first = next(i for i, sizes in enumerate(expected.sizes) if found.sizes[i] != sizes)
            widths = [product.sizes[first][-1] for product in (found, expected)]
            fact = (
                f"In its attention (product {first} of its forward pass) heads are {widths[0]} wide with a part of its "
                f"matrices, and {widths[1]} with all of them: it would be another model."
            )
        return LoopError(
            f"The forward of a {self.kind} does not work with matrices that {self.size} processes share.",
            fact,
            "count the heads that are there: q.unflatten(-1, (-1, head_width)) for q.view(batch, length, heads, ...); "
            "or a plan of your own that leaves attention whole: run.place(build, plan={'blocks.*.up': "
            "ColwiseParallel(), 'blocks.*.down': RowwiseParallel()}).",
        )


def _agree(expected: ProductMode, found: ProductMode | None) -> bool:
    """Return whether the products have the same sizes; other numbers of products cannot be compared."""
    return found is not None and (found.sizes == expected.sizes or len(found.sizes) != len(expected.sizes))


def _meta_copy(model: nn.Module) -> nn.Module:
    """Copy a model without its data and hooks."""
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(t): t.detach().to("meta") for t in tensors}
    memo |= {id(p): nn.Parameter(memo[id(p)], requires_grad=False) for p in model.parameters()}
    copied = copy.deepcopy(model, memo)
    for part in copied.modules():
        for hooks in forward_hooks_of(part):
            hooks.clear()
    return copied


def _products(model: nn.Module, args: Any, kwargs: Any) -> tuple[ProductMode | None, str]:
    """Return the products within heads of a forward pass; or None, and the error of the forward pass."""
    args, kwargs = tree_map_only(torch.Tensor, lambda t: t.detach().to("meta"), (args, kwargs))
    try:
        with (
            torch.no_grad(),
            torch.device("meta"),
            ProductMode() as products,
        ):  # a mask that it makes has no data either
            model(*args, **kwargs)
    except Exception as error:
        return None, str(error).partition("\n")[0]
    return products, ""


class ProductMode(TorchFunctionMode):
    """Note the sizes in attention: torch's own, and products of tensors with four dims, as in attention by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Sizes = []
        self.heads: list[int] = []
        """The number of heads of every product, in order."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            query = args[0] if args else (kwargs or {})["query"]
            self.sizes.append((query.shape[-1],))
            self.heads += query.shape[-3:-2]
        elif func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__) and len(args) == 2:
            first, second = args
            if first.dim() > 3 and second.dim() > 3:
                self.sizes.append((*second.shape[-2:], *first.shape[-2:]))
                self.heads.append(first.shape[-3])
        return func(*args, **(kwargs or {}))
