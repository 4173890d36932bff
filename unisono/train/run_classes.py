"""Which kind of run an exchange needs: most need none of their own. Nothing else asks which one is in use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from unisono.config import Settings
from unisono.train.run import Run

_kinds = {"server": "unisono.param_server.sync_servers:kind_of"}
"""Of an exchange, the function that says which kind of run these settings ask for."""


def run_class(settings: Settings, kind: type[Run[Any]] = Run) -> type[Run[Any]]:
    """The class of a run with these settings; `kind`: what it is beside that (a traced one, say)."""
    if settings.exchange not in _kinds:
        return kind
    module, name = _kinds[settings.exchange].split(":")
    choose: Callable[[Settings], type[Run[Any]]] = getattr(importlib.import_module(module), name)
    found = choose(settings)
    return found if kind is Run else type("Run", (kind, found), {})
