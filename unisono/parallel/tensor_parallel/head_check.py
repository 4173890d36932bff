"""Heads: does a forward pass see, with its divided matrices, heads as wide as those of the whole model?

Code that counts all heads, `q.view(batch, length, self.heads, -1)`, runs with half of the features as well: it finds as
many heads that are half as wide, and computes another model without a word. So in front of the first forward pass two
copies of the model without data (on torch's meta device) are given the shapes of its inputs: one as it was, and one
whose matrices have the sizes that they have here. Products within heads must have the same sizes in both:

    whole    q [b, 4 heads, t, 8]  k [b, 4, t, 8]        here    q [b, 2 heads, t, 8]  right
                                                                 q [b, 4 heads, t, 4]  another model

What cannot be followed without data (a branch on a value) is not looked at. Nothing is computed, and no random numbers
are drawn that anybody would miss.
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

Sizes = list[tuple[int, ...]]
"""Of every product within heads, in order: the sizes that do not depend on how many heads there are."""


class HeadCheck:
    """The two copies of a model that is about to be cut, until they have been looked at.

    cut  the modules that will be cut: name, and the dim of their weight (0: outputs, 1: inputs)
    """

    def __init__(self, model: nn.Module, cut: Iterable[tuple[str, int]], size: int) -> None:
        self.kind, self.size = type(model).__name__, size
        self.copies: tuple[nn.Module, nn.Module] | None = None
        try:
            self.copies = _empty(model), _empty(model)
        except Exception:  # something in it cannot be copied
            return
        for name, dim in cut:
            part = self.copies[1].get_submodule(name)
            for key, p in list(part.named_parameters(recurse=False)):
                if p.dim() > dim:
                    setattr(part, key, nn.Parameter(p[: len(p) // size] if dim == 0 else p[:, : p.shape[1] // size]))

    def check(self, args: Any, kwargs: Any) -> None:
        """Before the first forward pass with these inputs. Raises LoopError if it would compute another model."""
        if self.copies is None or not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs))):
            return
        (whole, here), self.copies = self.copies, None
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            products, _ = _products(whole, args, kwargs)
            parts, problem = _products(here, args, kwargs) if products is not None else (None, "")
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])
        if products is None:
            return
        true, found = products.sizes, parts.sizes if parts is not None else None
        if found is not None and (found == true or len(found) != len(true)):
            return
        uneven = next((heads for heads in products.heads if heads % self.size), None)
        if uneven is not None:
            fewer = max(n for n in range(1, self.size) if uneven % n == 0)
            raise LoopError(
                f"parallel.tensor={self.size} was asked for a {self.kind}.",
                f"Its attention has {uneven} heads, and each process computes whole ones: {uneven} is no multiple of "
                f"{self.size}.",
                f"--set parallel.tensor={fewer if fewer > 1 else uneven}, or another number of heads.",
            )
        if found is None:
            told = f"With a part of its matrices, its forward pass cannot go on: {problem}"
        else:
            first = next(i for i, sizes in enumerate(true) if found[i] != sizes)
            wide = [sizes[first][-1] for sizes in (found, true)]
            told = (
                f"In its attention (product {first} of its forward pass) heads are {wide[0]} wide with a part of its "
                f"matrices, and {wide[1]} with all of them: it would be another model."
            )
        raise LoopError(
            f"A {self.kind} was to go forward with matrices that {self.size} processes share (parallel.tensor).",
            told,
            "count the heads that are there: q.unflatten(-1, (-1, head_width)) for q.view(batch, length, heads, ...); "
            "or a plan of your own that leaves attention whole: run.place(build, plan={'blocks.*.up': "
            "ColwiseParallel(), 'blocks.*.down': RowwiseParallel()}).",
        )


def _empty(model: nn.Module) -> nn.Module:
    """A copy without data and without hooks."""
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(t): t.detach().to("meta") for t in tensors}
    memo |= {id(p): nn.Parameter(memo[id(p)], requires_grad=False) for p in model.parameters()}
    copied = copy.deepcopy(model, memo)
    for part in copied.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            hooks.clear()
    return copied


def _products(model: nn.Module, args: Any, kwargs: Any) -> tuple[ProductMode | None, str]:
    """What a forward pass multiplies within heads, or None and why it did not come to its end."""
    args, kwargs = tree_map_only(torch.Tensor, lambda t: t.detach().to("meta"), (args, kwargs))
    try:
        with torch.no_grad(), torch.device("meta"), ProductMode() as products:  # a mask that is made there is empty too
            model(*args, **kwargs)
    except Exception as error:
        return None, str(error).partition("\n")[0]
    return products, ""


class ProductMode(TorchFunctionMode):
    """Listens to attention: to torch's own, and to products of tensors with four dims, as people write it by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Sizes = []
        self.heads: list[int] = []
        """Of every product, in order."""

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
