"""Unisono: train on one process or a hundred and get the same model, to the last bit.

The names below are the public API. Each is imported when it is first used, so `import unisono` loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unisono import environment as environment  # now: it records the working directory before a script changes it

__version__ = "0.1.0"

_EXPORTS = {
    "main": "unisono.entrypoint",
    "launch": "unisono.notebook",
    "Settings": "unisono.config",
    "CheckpointSettings": "unisono.config",
    "LoaderSettings": "unisono.config",
    "ParallelSettings": "unisono.config",
    "PromiseSettings": "unisono.config",
    "SpeedSettings": "unisono.config",
    "Prediction": "unisono.prediction.batch_inference",
    "SavedWeights": "unisono.checkpoint.saved_weights",
    "SequenceDims": "unisono.parallel.context_parallel.sequence_split",
    "Run": "unisono.train.run",
    "Mixture": "unisono.data.mixture",
    "Packed": "unisono.data.packing",
    "ShardCache": "unisono.data.streaming.shard_cache",
    "document_bounds": "unisono.data.packing",
    "document_mask": "unisono.data.packing",
    "next_tokens": "unisono.data.packing",
    "Step": "unisono.train.step",
    "Stream": "unisono.data.streaming.stream",
    "ParallelPlan": "unisono.parallel.parallel_plan",
    "Exchange": "unisono.exchange.base",
    "Collectives": "unisono.distributed.collectives",
    "World": "unisono.environment",
    "cache_folder": "unisono.environment",
    "UnisonoError": "unisono.errors",
    "SettingsError": "unisono.errors",
    "WorldError": "unisono.errors",
    "DataError": "unisono.errors",
    "LoopError": "unisono.errors",
    "NotFiniteError": "unisono.errors",
    "CheckpointError": "unisono.errors",
    "RankFailedError": "unisono.errors",
    "DivergenceError": "unisono.errors",
    "PromiseBrokenError": "unisono.errors",
    "PeerLostError": "unisono.errors",
    "OutOfMemoryError": "unisono.errors",
    "StuckError": "unisono.errors",
}

_MODULES = ("distill", "integrations", "pruning", "ray", "scaling")

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
    from unisono import distill as distill
    from unisono import integrations as integrations
    from unisono import pruning as pruning
    from unisono import ray as ray
    from unisono import scaling as scaling
    from unisono.checkpoint.saved_weights import SavedWeights as SavedWeights
    from unisono.config import CheckpointSettings as CheckpointSettings
    from unisono.config import LoaderSettings as LoaderSettings
    from unisono.config import ParallelSettings as ParallelSettings
    from unisono.config import PromiseSettings as PromiseSettings
    from unisono.config import Settings as Settings
    from unisono.config import SpeedSettings as SpeedSettings
    from unisono.data.mixture import Mixture as Mixture
    from unisono.data.packing import Packed as Packed
    from unisono.data.packing import document_bounds as document_bounds
    from unisono.data.packing import document_mask as document_mask
    from unisono.data.packing import next_tokens as next_tokens
    from unisono.data.streaming.shard_cache import ShardCache as ShardCache
    from unisono.data.streaming.stream import Stream as Stream
    from unisono.distributed.collectives import Collectives as Collectives
    from unisono.entrypoint import main as main
    from unisono.environment import World as World
    from unisono.environment import cache_folder as cache_folder
    from unisono.errors import CheckpointError as CheckpointError
    from unisono.errors import DataError as DataError
    from unisono.errors import DivergenceError as DivergenceError
    from unisono.errors import LoopError as LoopError
    from unisono.errors import NotFiniteError as NotFiniteError
    from unisono.errors import OutOfMemoryError as OutOfMemoryError
    from unisono.errors import PeerLostError as PeerLostError
    from unisono.errors import PromiseBrokenError as PromiseBrokenError
    from unisono.errors import RankFailedError as RankFailedError
    from unisono.errors import SettingsError as SettingsError
    from unisono.errors import StuckError as StuckError
    from unisono.errors import UnisonoError as UnisonoError
    from unisono.errors import WorldError as WorldError
    from unisono.exchange.base import Exchange as Exchange
    from unisono.notebook import launch as launch
    from unisono.parallel.context_parallel.sequence_split import SequenceDims as SequenceDims
    from unisono.parallel.parallel_plan import ParallelPlan as ParallelPlan
    from unisono.prediction.batch_inference import Prediction as Prediction
    from unisono.train.run import Run as Run
    from unisono.train.step import Step as Step


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"unisono.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}; it has {', '.join(__all__)}")
    if name in ("main", "launch"):  # before a module needs something that an old torch lacks
        importlib.import_module("unisono.torch_compat.versions").require_torch()
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value
