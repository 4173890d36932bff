"""The known trackers: a name for the setting `track`, the class, and the package that it needs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from difflib import get_close_matches
from importlib.util import find_spec
from typing import NamedTuple, cast

from unisono.errors import Problem
from unisono.trackers.tracker import Tracker


class TrackerEntry(NamedTuple):
    """A tracker.

    Attributes:
        target: Its class, as module:name.
        package: The package that it imports; "": none.
        install: What to install for it.
    """

    target: str
    package: str = ""
    install: str = ""


TRACKERS = {
    "csv": TrackerEntry("unisono.trackers.csv_file:CsvFile"),
    "tensorboard": TrackerEntry("unisono.trackers.tensorboard:TensorBoard"),
}


def names_of(track: str) -> list[str]:
    """Return the trackers that a value of the setting `track` names."""
    return list(dict.fromkeys(name.strip() for name in track.split(",") if name.strip()))


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
        elif entry.package and find_spec(entry.package) is None:
            error = f"track = {name} needs the package {entry.package}."
            problems.append(Problem(error, "It is not installed.", f"pip install {entry.install or entry.package}"))
    return problems


def build_tracker(name: str) -> Tracker:
    """Build the tracker of this name."""
    module, _, attribute = TRACKERS.get(name, TrackerEntry(name)).target.partition(":")
    return cast(Tracker, getattr(importlib.import_module(module), attribute)())
