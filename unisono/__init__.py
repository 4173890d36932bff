"""Unisono: train on one process or a hundred and get the same model, to the last bit.

The names below are all there is to learn. They are resolved when first used, so `import unisono` loads no torch.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from unisono import env as env  # at once, because it notes where we are before the script goes elsewhere

__version__ = "0.1.0"

_door = {
    "main": "unisono.cli.script",
    "launch": "unisono.cli.interactive",
    "Settings": "unisono.settings",
    "CheckpointSettings": "unisono.settings",
    "LoaderSettings": "unisono.settings",
    "ParallelSettings": "unisono.settings",
    "PromiseSettings": "unisono.settings",
    "Sequence": "unisono.parallel.sequence",
    "Run": "unisono.train.run",
    "Step": "unisono.train.step",
    "Stream": "unisono.data.streams",
    "Placement": "unisono.parallel.placement",
    "Exchange": "unisono.exchange",
    "Collectives": "unisono.world.verbs",
    "World": "unisono.env",
    "UnisonoError": "unisono.errors",
    "SettingsError": "unisono.errors",
    "WorldError": "unisono.errors",
    "DataError": "unisono.errors",
    "LoopError": "unisono.errors",
    "CheckpointError": "unisono.errors",
    "RankFailed": "unisono.errors",
    "Diverged": "unisono.errors",
    "PromiseBroken": "unisono.errors",
}

__all__ = ["__version__", *_door]

if TYPE_CHECKING:
    from unisono.cli.interactive import launch as launch
    from unisono.cli.script import main as main
    from unisono.data.streams import Stream as Stream
    from unisono.env import World as World
    from unisono.errors import CheckpointError as CheckpointError
    from unisono.errors import DataError as DataError
    from unisono.errors import Diverged as Diverged
    from unisono.errors import LoopError as LoopError
    from unisono.errors import PromiseBroken as PromiseBroken
    from unisono.errors import RankFailed as RankFailed
    from unisono.errors import SettingsError as SettingsError
    from unisono.errors import UnisonoError as UnisonoError
    from unisono.errors import WorldError as WorldError
    from unisono.exchange import Exchange as Exchange
    from unisono.parallel.placement import Placement as Placement
    from unisono.parallel.sequence import Sequence as Sequence
    from unisono.settings import CheckpointSettings as CheckpointSettings
    from unisono.settings import LoaderSettings as LoaderSettings
    from unisono.settings import ParallelSettings as ParallelSettings
    from unisono.settings import PromiseSettings as PromiseSettings
    from unisono.settings import Settings as Settings
    from unisono.train.run import Run as Run
    from unisono.train.step import Step as Step
    from unisono.world.verbs import Collectives as Collectives


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _door:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_door[name]), name)
    globals()[name] = value
    return value


class _Door(types.ModuleType):
    """`unisono.launch` is the function, also once the package of that name is imported, which sets the attribute."""

    @property
    def launch(self) -> Any:
        return importlib.import_module(_door["launch"]).launch

    @launch.setter
    def launch(self, package: types.ModuleType) -> None:
        pass


sys.modules[__name__].__class__ = _Door
