"""The settings of a run: frozen, keyword-only dataclasses, and the one way to load them.

A script's own class adds fields and changes defaults; a TOML file overrides the script, and `--set key=value` overrides
the file. Every value keeps its source, and all problems are reported together, before training starts.

    @dataclass(frozen=True, kw_only=True)
    class Settings(unisono.Settings):
        batch: int = 64
        lr: float = 3e-4
        model: Model = Model()                        # a nested dataclass: model.width, model.depth

    loaded = load(Settings, file=Path("small.toml"), sets=["model.width=64", "steps=20"])
    loaded.settings.model.width, loaded.sources["model.width"]              # 64, "--set"

A value is a number, true or false, text, a path, one of a Literal's or Enum's choices, a list of these, or none: what a
line of TOML can hold. TOML has no null, so the text "none" stands for None wherever None is allowed.
"""

from __future__ import annotations

from unisono.config.command_line import CommandLine, merge_corrections
from unisono.config.entries import SettingEntry, entries_of, flatten, result_settings
from unisono.config.resolve import LoadedSettings, SettingsSources, gather, load
from unisono.config.schema import (
    BalanceSettings,
    CheckpointSettings,
    CompressSettings,
    DdpSettings,
    DivergenceSettings,
    LoaderSettings,
    LocalSGDSettings,
    MachineSettings,
    MetricsSettings,
    ParallelSettings,
    PlanSettings,
    ProfileSettings,
    PromiseSettings,
    SecureSettings,
    ServerSettings,
    Settings,
    SpeedSettings,
    TreeSettings,
    WatchdogSettings,
)
from unisono.config.toml_file import provenance_lines, read
from unisono.config.value_types import kind, plain, shown, toml
from unisono.config.wording import nearest_name, plural, size

__all__ = [
    "CheckpointSettings",
    "CompressSettings",
    "DdpSettings",
    "BalanceSettings",
    "PlanSettings",
    "TreeSettings",
    "DivergenceSettings",
    "MachineSettings",
    "LoaderSettings",
    "LocalSGDSettings",
    "MetricsSettings",
    "ParallelSettings",
    "ProfileSettings",
    "PromiseSettings",
    "SecureSettings",
    "ServerSettings",
    "SpeedSettings",
    "Settings",
    "WatchdogSettings",
    "LoadedSettings",
    "SettingEntry",
    "CommandLine",
    "merge_corrections",
    "SettingsSources",
    "load",
    "gather",
    "ENVIRONMENT",
    "flatten",
    "result_settings",
    "provenance_lines",
    "read",
    "entries_of",
    "nearest_name",
    "kind",
    "plain",
    "shown",
    "size",
    "toml",
    "plural",
]

ENVIRONMENT = ("torch", "numpy", "device", "processor", "instruction_set", "threads")
"""Properties of a machine that bits depend on, besides settings; `threads` is both."""
