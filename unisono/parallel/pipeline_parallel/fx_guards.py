"""Detect Python operations on proxies whose results differ from those on real tensors while a forward is traced.

torch.fx traces a forward with a Proxy for everything that depends on its inputs. `if x.sum() > 0` raises an error then.
But Python evaluates some expressions itself, without an error, and the forward takes another path than with a batch:

    isinstance(x, Tensor), match x     reads x.__class__                  detected when it is read
    hasattr(x, "mask"), getattr(., d)  a Proxy has every attribute        detected: it is called for, not loaded
    x in self.heads, {x: 1}            hash(x) is the Proxy's own         detected
    type(x), case {"x": x}             cannot be intercepted              detected in the bytecode
    x is None                          compares identities                detected in the bytecode

A forward with one of the first four is not traced (shadow_partition.py runs it). The last one mostly concerns arguments
with a default. So the forward is traced as if no other value were None, and every call checks that (fx_partition.py).

Only the model's own code counts: torch's functions use these expressions as well, and work correctly with proxies.
"""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from torch import fx

PYTREE = "torch.utils._pytree"
TRANSPARENT = ("torch", PYTREE)
"""Modules that act on behalf of their callers (torch.is_tensor, tree_map of a batch); so does the standard library."""

EXCLUDED = ("torch.nn.modules.module", "unisono.parallel", "unisono.train")
"""Modules that are not part of a model's forward. Their submodules are not, either."""


NEVER_NONE = ("shape", "device", "dtype", "ndim")

IN_PLACE = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")
"""The in-place operators of Python."""


class TraceGuards:
    """Collect the operations on proxies while a forward is traced.

    Attributes:
        problem: Why the forward cannot be traced; None: it can.
        asks_none: Whether it compares a value with None.
        unused: Attributes that were looked up and not used so far.
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        self.asks_none = False
        self.unused: dict[int, DeferredAttribute] = {}

    def note(self, what: str, frame: FrameType | None) -> None:
        """Record an operation on a proxy, if it is in the model's own code."""
        if is_models(frame):
            self.problem = self.problem or f"it asks for the {what} of something that follows from its inputs"

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Read the bytecode of the model's functions that are called within this block."""
        before = sys.getprofile()

        def on_event(frame: FrameType, event: str, _: Any) -> None:
            name = _module_of(frame)
            if event == "call" and (name == PYTREE or not _is_transparent(name)) and is_models(frame):
                types, nones = questions_of_code(frame.f_code)
                self.asks_none |= nones
                if types:
                    self.problem = self.problem or f"{frame.f_code.co_name} asks for the type of something"

        sys.setprofile(on_event)
        try:
            yield
        finally:
            sys.setprofile(before)


def _caller() -> FrameType:
    """Return the frame that called the caller of this function. inspect.currentframe would do the same, slower."""
    return sys._getframe(2)


class GuardedProxy(fx.Proxy):
    """A Proxy that records operations in the `guards` of its tracer."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        self.tracer.guards.note("class", _caller())  # type: ignore[attr-defined]
        return type(self)

    def __getattr__(self, name: str) -> DeferredAttribute:
        caller = _caller()
        if dis.opname[caller.f_code.co_code[caller.f_lasti]].startswith(("CALL", "PRECALL")):
            self.tracer.guards.note("attributes", caller)  # type: ignore[attr-defined]
        return DeferredAttribute(self, name)

    def __hash__(self) -> int:
        self.tracer.guards.note("hash", _caller())  # type: ignore[attr-defined]
        return id(self)


def _in_place(name: str) -> Any:
    """Trace `x += y` as an in-place operation. torch.fx would trace a sum, which changes no other reference to x."""

    def impl(self: GuardedProxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})

    return impl


for _name in IN_PLACE:
    setattr(GuardedProxy, f"__{_name}__", _in_place(_name))


class DeferredAttribute(fx.proxy.Attribute, GuardedProxy):
    """An attribute of a proxy; its node is created when it is used or called."""

    def __init__(self, root: fx.Proxy, name: str) -> None:
        super().__init__(root, name)
        if name not in NEVER_NONE:
            self.tracer.guards.unused[id(self)] = self  # type: ignore[attr-defined]

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        self.tracer.guards.unused.pop(id(self), None)  # type: ignore[attr-defined]
        return super().node

    def __call__(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        self.tracer.guards.unused.pop(id(self), None)  # type: ignore[attr-defined]
        return super().__call__(*args, **kwargs)

    __hash__ = GuardedProxy.__hash__


def is_models(frame: FrameType | None) -> bool:
    """Return whether a frame runs a model's own code, directly or through transparent modules.

    Modules of torch.nn count as models.
    """
    while frame is not None and _is_transparent(_module_of(frame)):
        frame = frame.f_back
    if frame is None or (name := _module_of(frame)).startswith(EXCLUDED):
        return False
    return name.startswith("torch.nn.modules.") or not f"{name}.".startswith("torch.")


def _is_transparent(name: str) -> bool:
    return name in TRANSPARENT or name.partition(".")[0] in sys.stdlib_module_names


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


@lru_cache(maxsize=4096)
def questions_of_code(code: CodeType) -> tuple[bool, bool]:
    """Return whether a function's bytecode reads a type, and whether it compares a value with None."""
    types = nones = False
    for instruction in dis.get_instructions(code):
        types |= instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval == "type"
        types |= instruction.opname in ("MATCH_MAPPING", "MATCH_SEQUENCE")
        nones |= instruction.opname == "IS_OP" or instruction.opname.endswith("_NONE")
    return types, nones
