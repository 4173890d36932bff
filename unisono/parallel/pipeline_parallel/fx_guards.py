"""What a forward asks Python about the stand-ins that it is followed with, and would be told otherwise of real tensors.

torch.fx follows a forward with a Proxy for whatever depends on its inputs. `if x.sum() > 0` is an error then. But
Python answers some questions itself, without one, and the forward goes another way than with a batch:

    isinstance(x, Tensor), match x     sees x.__class__                   noticed, when it is asked
    hasattr(x, "mask"), getattr(., d)  a Proxy has every attribute        noticed: it is called for, not loaded
    x in self.heads, {x: 1}            hash(x) is the Proxy's own         noticed
    type(x), case {"x": x}             sees what nobody can say           noticed, where it is written
    x is None                          sees which object it is            noticed, where it is written

Of the first four a forward is not followed (but run: shadow_partition.py). The last is asked of arguments with a
default mostly, so it is followed as if nothing else were None, and that is looked at in every call (fx_partition.py).

Only the questions of the model's own code count: torch's functions ask as well, and do what they should.
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

TREES = "torch.utils._pytree"
THROUGH = ("torch", TREES)
"""Modules that ask for whoever calls them (torch.is_tensor, tree_map of a batch); Python's own are others."""

OTHERS = ("torch.nn.modules.module", "unisono.parallel", "unisono.train")
"""Modules whose questions are no part of a model's forward, nor are those of what is in them."""


NEVER_NONE = ("shape", "device", "dtype", "ndim")


class TraceGuards:
    """What was asked while a forward was followed.

    why    it cannot be followed; None: it can
    nones  does it ask whether something is None?
    loose  attributes that were looked up, and not used so far
    """

    def __init__(self) -> None:
        self.why: str | None = None
        self.nones = False
        self.loose: dict[int, DeferredAttribute] = {}

    def note(self, what: str, asker: FrameType | None) -> None:
        """Somebody asks; what matters is whether the model does."""
        if is_models(asker):
            self.why = self.why or f"it asks for the {what} of something that follows from its inputs"

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In it, the model's code that is run is read."""
        before = sys.getprofile()

        def look(frame: FrameType, event: str, _: Any) -> None:
            name = _name(frame)
            if event == "call" and (name == TREES or not _through(name)) and is_models(frame):
                types, nones = asks_of_code(frame.f_code)
                self.nones |= nones
                if types:
                    self.why = self.why or f"{frame.f_code.co_name} asks for the type of something"

        sys.setprofile(look)
        try:
            yield
        finally:
            sys.setprofile(before)


class GuardedProxy(fx.Proxy):
    """A Proxy that notices what is asked of it; its tracer has `asked`."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        self.tracer.asked.note("class", sys._getframe(1))  # type: ignore[attr-defined]
        return type(self)

    def __getattr__(self, name: str) -> DeferredAttribute:
        asker = sys._getframe(1)
        if dis.opname[asker.f_code.co_code[asker.f_lasti]].startswith(("CALL", "PRECALL")):
            self.tracer.asked.note("attributes", asker)  # type: ignore[attr-defined]
        return DeferredAttribute(self, name)

    def __hash__(self) -> int:
        self.tracer.asked.note("hash", sys._getframe(1))  # type: ignore[attr-defined]
        return id(self)


def _in_place(name: str) -> Any:
    """`x += y` as it is: torch.fx would make a sum of it, and whoever else has x would have the old one."""

    def impl(self: GuardedProxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})

    return impl


WRITES = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")
for _name_of in WRITES:
    setattr(GuardedProxy, f"__{_name_of}__", _in_place(_name_of))


class DeferredAttribute(fx.proxy.Attribute, GuardedProxy):
    """An attribute that was looked up; that is computed when it is used, or called."""

    def __init__(self, root: fx.Proxy, name: str) -> None:
        super().__init__(root, name)
        if name not in NEVER_NONE:
            self.tracer.asked.loose[id(self)] = self  # type: ignore[attr-defined]

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        self.tracer.asked.loose.pop(id(self), None)  # type: ignore[attr-defined]
        return super().node

    def __call__(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        self.tracer.asked.loose.pop(id(self), None)  # type: ignore[attr-defined]
        return super().__call__(*args, **kwargs)

    __hash__ = GuardedProxy.__hash__


def is_models(frame: FrameType | None) -> bool:
    """Does this belong to a model's own code? Modules of torch.nn are models as others are."""
    while frame is not None and _through(_name(frame)):
        frame = frame.f_back
    if frame is None or (name := _name(frame)).startswith(OTHERS):
        return False
    return name.startswith("torch.nn.modules.") or not f"{name}.".startswith("torch.")


def _through(name: str) -> bool:
    return name in THROUGH or name.partition(".")[0] in sys.stdlib_module_names


def _name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


@lru_cache(maxsize=4096)
def asks_of_code(code: CodeType) -> tuple[bool, bool]:
    """Does this code ask for a type, and does it ask whether something is None?"""
    types = nones = False
    for instruction in dis.get_instructions(code):
        types |= instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval == "type"
        types |= instruction.opname in ("MATCH_MAPPING", "MATCH_SEQUENCE")
        nones |= instruction.opname == "IS_OP" or instruction.opname.endswith("_NONE")
    return types, nones
