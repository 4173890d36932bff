"""A tensor with nothing in it: it says what shape, dtype and device it has, and what is computed with it is another.

A stage of a pipeline (shadow_partition.py) has shadows where other stages have numbers. Code that only wants to know
how long a sequence is, or moves a tensor about, does not notice. What would look into one is told that there is nothing
to see.

torch computes with meta tensors what comes out of an operator (https://docs.pytorch.org/docs/stable/meta.html); that a
tensor claims to be on another device than where it lies is a wrapper subclass, as torch's own FakeTensor is one
(https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html). That one goes on for ever; a shadow ends where
the stage's own part begins: there it becomes the tensor that has arrived for it, or an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from unisono.errors import LoopError


class ShadowStage(Protocol):
    """Where shadows are seen."""

    def real(self, shadow: ShadowTensor) -> torch.Tensor:
        """The tensor that has arrived for it; otherwise itself."""

    def refusal(self, shadow: ShadowTensor) -> LoopError | None:
        """Why nothing can be computed with it just now; None: it can."""


class ShadowTensor(torch.Tensor):
    """maker: what has the numbers, in words"""

    stage: ShadowStage
    maker: str

    @staticmethod
    def of(like: torch.Tensor, stage: ShadowStage, maker: str) -> ShadowTensor:
        """The shadow of a tensor, or of a meta tensor."""
        return shadow_like(like, like.device, stage, maker)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShadowTensor:
        return self  # there is nothing to copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Shadow(of {self.maker}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(ShadowTensor, lambda shadow: shadow.stage.real(shadow), (args, dict(kwargs or {})))
        if next(_shadows(args, kwargs), None) is None:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        shadow = next(_shadows(args, kwargs))
        if (error := shadow.stage.refusal(shadow)) is not None:
            raise error
        written = _written(func, args, kwargs)
        if any(not isinstance(target, ShadowTensor) for target in written):
            raise _unseen(shadow, f"{func} writes it into a tensor that is no part of it")
        device = torch.device(kwargs.get("device") or shadow.device)
        if "device" in kwargs:
            kwargs["device"] = "meta"
        shapes = [target.shape for target in written]
        args, kwargs = tree_map_only(torch.Tensor, _meta, (args, kwargs))
        try:
            found = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            raise _unseen(shadow, str(error).splitlines()[0]) from error
        if written:
            if [target.shape for target in written] != shapes:
                raise _unseen(shadow, f"{func} changes its shape")
            return written[0] if len(written) == 1 else tuple(written)
        return tree_map_only(torch.Tensor, lambda t: shadow_like(t, device, shadow.stage, shadow.maker), found)


def shadow_like(like: torch.Tensor, device: torch.device, stage: ShadowStage, maker: str) -> ShadowTensor:
    made: ShadowTensor = torch.Tensor._make_wrapper_subclass(
        ShadowTensor, like.shape, strides=like.stride(), dtype=like.dtype, device=device
    )
    made.stage, made.maker = stage, maker
    return made


def _shadows(args: Any, kwargs: Any) -> Iterator[ShadowTensor]:
    return (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ShadowTensor))


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator writes to."""
    found: list[Any] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name))
    return [target for target in found if isinstance(target, torch.Tensor)]


def _unseen(shadow: ShadowTensor, why: str) -> LoopError:
    return LoopError(
        f"What {shadow.maker} computes was looked into, on the way to a later stage of a pipeline.",
        f"There it is known by its shape only: {why}.",
        "let a module do it that is called later, or earlier, as a whole; or --set parallel.pipeline=1",
    )
