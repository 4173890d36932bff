"""Which class of run an exchange needs: most exchanges need none of their own. Nothing else depends on the class."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from unisono.config import Settings
from unisono.config.exchanges import EXCHANGES
from unisono.train.run import Run


def run_class(settings: Settings, kind: type[Run[Any]] = Run) -> type[Run[Any]]:
    """Return the class of a run with these settings; `kind`: another class that it shall also be, a traced run say."""
    target = EXCHANGES[settings.exchange].run_class
    if not target:
        return kind
    module, name = target.split(":")
    choose: Callable[[Settings], type[Run[Any]]] = getattr(importlib.import_module(module), name)
    found = choose(settings)
    return found if kind is Run else type("Run", (kind, found), {})
