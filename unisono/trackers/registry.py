"""The known trackers: a name for the setting `track`, the class, and the package that it needs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, cast

from unisono.errors import Problem
from unisono.trackers.tracker import Tracker


class TrackerEntry(NamedTuple):
    """A tracker.

    Attributes:
        target: Its class, as module:name.
        package: The package that it imports; "": none.
        variables: Environment variables that its library gets unless the user has set them. {dir} is the run directory.
    """

    target: str
    package: str = ""
    variables: Mapping[str, str] = MappingProxyType({})


TRACKERS = {
    "csv": TrackerEntry("unisono.trackers.csv_file:CsvFile"),
    "tensorboard": TrackerEntry("unisono.trackers.tensorboard:TensorBoard"),
    "mlflow": TrackerEntry(
        "unisono.trackers.mlflow:MLflow",
        "mlflow",
        {  # https://mlflow.org/docs/latest/api_reference/python_api/mlflow.environment_variables.html
            "MLFLOW_TRACKING_URI": "sqlite:///{dir}/mlflow/mlflow.db",
            "MLFLOW_DISABLE_TELEMETRY": "true",  # which would also write into the home folder
            "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
        },
    ),
    "wandb": TrackerEntry(
        "unisono.trackers.wandb:WandB",
        "wandb",
        {  # https://docs.wandb.ai/models/track/environment-variables
            "WANDB_MODE": "offline",
            "WANDB_DIR": "{dir}",
            "WANDB_CACHE_DIR": "{dir}/wandb/cache",
            "WANDB_CONFIG_DIR": "{dir}/wandb/config",
            "WANDB_DATA_DIR": "{dir}/wandb/data",
            "WANDB_ERROR_REPORTING": "false",
        },
    ),
    "trackio": TrackerEntry(
        "unisono.trackers.trackio:Trackio",
        "trackio",
        {"TRACKIO_DIR": "{dir}/trackio", "HF_HUB_DISABLE_TELEMETRY": "1"},
    ),
}


def names_of(track: str) -> list[str]:
    """Return the trackers that a value of the setting `track` names."""
    return list(dict.fromkeys(name.strip() for name in track.split(",") if name.strip()))


def variables_of(track: str, run_dir: Path) -> dict[str, str]:
    """Return the environment variables of these trackers' libraries, for a run that writes to this directory."""
    entries = [TRACKERS[name] for name in names_of(track) if name in TRACKERS]
    folder = str(run_dir.absolute())
    return {name: value.replace("{dir}", folder) for entry in entries for name, value in entry.variables.items()}


def tracker_problems(track: str, choose: Callable[[str], str]) -> list[Problem]:
    """Return a problem for each tracker that is unknown, or whose package is not installed.

    Args:
        track: the value of the setting.
        choose: returns what to type for "track=csv".
    """
    problems = []
    for name in names_of(track):
        entry = TRACKERS.get(name)
        if entry is None and ":" in name:
            continue  # its module may be beside the script: the follower reports an error
        if entry is None:
            known = f"Trackers are {', '.join(TRACKERS)}; your own is module:Class."
            near = get_close_matches(name, TRACKERS, 1) or list(TRACKERS)
            problems.append(Problem(f"track = {name} names no tracker.", known, choose(f"track={near[0]}")))
        elif entry.package and not _is_installed(entry.package):
            error = f"track = {name} needs the package {entry.package}."
            problems.append(Problem(error, "It is not installed.", f"pip install 'unisono[{name}]'"))
    return problems


def _is_installed(package: str) -> bool:
    """Return whether a package is installed. A folder of its name, which it may have made itself, is no package."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def build_tracker(name: str) -> Tracker:
    """Build the tracker of this name."""
    module, _, attribute = TRACKERS.get(name, TrackerEntry(name)).target.partition(":")
    return cast(Tracker, getattr(importlib.import_module(module), attribute)())
