"""A run of ours without the command around it, for a benchmark that has its own processes."""

from __future__ import annotations

import io
from pathlib import Path

from unisono.env import World
from unisono.settings import Settings
from unisono.train.run import Run
from unisono.world.collectives import Group


def build_run(settings: Settings, world: World, group: Group, folder: Path) -> Run[Settings]:
    """Everything that a run does between two steps, into a screen that nobody sees."""
    return Run(settings, world=world, group=group, run_dir=folder, identity={}, resumed=None, output=io.StringIO())
