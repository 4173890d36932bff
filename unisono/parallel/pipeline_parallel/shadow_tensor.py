"""A tensor without data: it has a shape, a dtype and a device, and operations on it return others.

A stage of a pipeline (shadow_partition.py) has shadows in place of the results of other stages. Code that only reads
the length of a sequence, or passes a tensor on, works with shadows as with tensors. Code that reads values raises an
error.

The results of operators are computed by torch's meta tensors (https://docs.pytorch.org/docs/stable/meta.html). A shadow
is a wrapper subclass, so that it can claim to be on another device, as torch's FakeTensor
(https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html). Unlike a FakeTensor, a shadow ends where the
stage's own part begins: a received tensor replaces it there, or an error is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from unisono.errors import LoopError
from unisono.torch_compat.modules import make_wrapper, no_torch_function, written_tensors


class ShadowStage(Protocol):
    """The stage in which a shadow is used."""

    def received_for(self, shadow: ShadowTensor) -> torch.Tensor:
        """Return the tensor that was received in place of a shadow; if there is none, the shadow itself."""

    def refusal(self, shadow: ShadowTensor) -> LoopError | None:
        """Return the error of an operation on a shadow, or None if it may be computed now."""


class ShadowTensor(torch.Tensor):
    """A tensor without data.

    Attributes:
        stage: The stage in which it is used.
        source: The module or parameter that has the data, for messages.
    """

    stage: ShadowStage
    source: str

    @staticmethod
    def of(like: torch.Tensor, stage: ShadowStage, source: str) -> ShadowTensor:
        """Return a shadow with the shape, dtype and device of a tensor."""
        return shadow_like(like, like.device, stage, source)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShadowTensor:
        return self  # a shadow has no data to copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Shadow(of {self.source}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(
            ShadowTensor, lambda shadow: shadow.stage.received_for(shadow), (args, dict(kwargs or {}))
        )
        if next(_shadows(args, kwargs), None) is None:
            return func(*args, **kwargs)
        with no_torch_function():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        shadow = next(_shadows(args, kwargs))
        if (error := shadow.stage.refusal(shadow)) is not None:
            raise error
        written = written_tensors(func, args, kwargs)
        if any(not isinstance(target, ShadowTensor) for target in written):
            raise _no_data_error(shadow, f"{func} writes it into a tensor that is no part of it")
        device = torch.device(kwargs.get("device") or shadow.device)
        if "device" in kwargs:
            kwargs["device"] = "meta"
        shapes = [target.shape for target in written]
        args, kwargs = tree_map_only(torch.Tensor, _as_meta, (args, kwargs))
        try:
            found = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            raise _no_data_error(shadow, str(error).splitlines()[0]) from error
        if written:
            if [target.shape for target in written] != shapes:
                raise _no_data_error(shadow, f"{func} changes its shape")
            return written[0] if len(written) == 1 else tuple(written)
        return tree_map_only(torch.Tensor, lambda t: shadow_like(t, device, shadow.stage, shadow.source), found)


def shadow_like(like: torch.Tensor, device: torch.device, stage: ShadowStage, source: str) -> ShadowTensor:
    """Return a shadow with the shape and dtype of a tensor, on another device."""
    shadow = make_wrapper(ShadowTensor, like.shape, like.stride(), like.dtype, device)
    assert isinstance(shadow, ShadowTensor)
    shadow.stage, shadow.source = stage, source
    return shadow


def _shadows(args: Any, kwargs: Any) -> Iterator[ShadowTensor]:
    return (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ShadowTensor))


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _no_data_error(shadow: ShadowTensor, why: str) -> LoopError:
    return LoopError(
        f"The forward reads values of what {shadow.source} computes, which are in another stage of the pipeline.",
        f"Until a later stage begins, it has only the shape: {why}.",
        "let a module do it that is called later, or earlier, as a whole; or --set parallel.pipeline=1",
    )
