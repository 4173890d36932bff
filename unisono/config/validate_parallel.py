"""Which ways of laying a model over devices go together: what is wrong with `parallel` beside the sizes of its axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.config.command_line import CommandLine
from unisono.config.mesh_shape import MeshShape
from unisono.config.schema import ParallelSettings, Settings
from unisono.errors import Problem

ONE_PROCESS = ("model_parallel_devices", "data_parallel_devices")
"""What uses several devices of one process."""

SEVERAL = ("shard", "tensor", "pipeline", "context")
"""What divides a model, or what it computes, among several processes."""


def asks_of_the_model(settings: Settings) -> bool:
    """Is anything asked that not every model can bear? Whole models whose gradients are added up are no such thing."""
    return settings.parallel != ParallelSettings() or settings.compress.kind != "none"


def problems_of_ways(values: Mapping[str, Any], line: CommandLine) -> list[Problem]:
    """`values`: of the settings that count, by their dotted names."""
    found = {name.removeprefix("parallel."): v for name, v in values.items() if name.startswith("parallel.")}
    inside = [name for name in ONE_PROCESS if found.get(name, 1) > 1]
    if len(inside) > 1:
        asked = " and ".join(f"parallel.{name} = {found[name]}" for name in inside)
        do = (
            f"{line.setting('parallel.data_parallel_devices=1')}, or: "
            f"{line.setting('parallel.model_parallel_devices=1')}"
        )
        return [Problem(asked, "One deals the model over devices, the other copies it to all of them.", do)]
    problems: list[Problem] = []
    for way in inside:
        asked = f"parallel.{way} = {found[way]}"
        for axis in SEVERAL:
            if found.get(axis, 1) != 1:
                true = "It uses several devices of one process; the other lays the model over several processes."
                do = f"{line.setting(f'parallel.{way}=1')}, or: {line.setting(f'parallel.{axis}=1')}"
                problems.append(Problem(f"{asked} and parallel.{axis} = {found[axis]}", true, do))
    if "data_parallel_devices" in inside:
        problems += _too_much_for_threads(found, line)
    return problems + _casts(found, values.get("precision"), line) + _devices(found, inside, line)


def problems_of_mixed(settings: Settings, line: CommandLine) -> list[Problem]:
    """What cannot be where processes have several kinds of device: accelerators and the CPU, NVIDIA's and AMD's. Whole
    models can; what lies over several processes is put together by torch, with one back end for one kind of device."""
    problems: list[Problem] = []
    asked = {f"parallel.{axis}": getattr(settings.parallel, axis) for axis in SEVERAL}
    wrong = [(f"{name} = {value}", f"{name}=1") for name, value in asked.items() if value != 1]
    wrong += [("exchange = ddp", "exchange=tree")] * (settings.exchange == "ddp")
    for what, instead in wrong:
        true = "Not all processes have the same kind of device, and torch does that for one kind of device."
        do = f"{line.setting(instead)}, or start processes on one kind of device only"
        problems.append(Problem(what, true, do))
    return problems


def problems_of_buddy(values: Mapping[str, Any], axes: MeshShape, line: CommandLine) -> list[Problem]:
    """A copy of each shard needs shards. `axes`: of the mesh that these values make."""
    if not values.get("parallel.replicate_shards") or "parallel.shard" not in values or axes.shard > 1:
        return []
    true = "It copies shards to the next process that has one, and with parallel.shard = 1 there are none."
    if axes.replicate > 1:
        true += f" All {axes.replicate} replicas are copies of each other."
    off = str(line.setting("parallel.replicate_shards=false"))
    if axes.pipeline > 1:  # which has no shards
        return [Problem("parallel.replicate_shards = true", true, off)]
    wanted = [f"parallel.shard={max(axes.replicate, 2)}"]
    wanted += ["parallel.replicate=-1"] * (values.get("parallel.replicate", -1) != -1)
    more = line if axes.replicate > 1 else line.in_processes(2 * axes.size)
    return [Problem("parallel.replicate_shards = true", true, f"{more.setting(*wanted)}, or: {off}")]


def _too_much_for_threads(found: Mapping[str, Any], line: CommandLine) -> list[Problem]:
    problems = []
    for name, off in (("activation_checkpoint", "none"), ("compile", False)):
        if found.get(name, off) != off:
            asked = (
                f"parallel.data_parallel_devices = {found['data_parallel_devices']} and parallel.{name} = "
                f"{str(found[name]).lower()}"
            )
            true = "torch.nn.DataParallel copies a model as it is written, in every forward pass anew."
            instead = line.setting("parallel.data_parallel_devices=1").in_processes(found["data_parallel_devices"])
            do = f"{instead}, or: {line.setting(f'parallel.{name}={str(off).lower()}')}"
            problems.append(Problem(asked, true, do))
    return problems


def _casts(found: Mapping[str, Any], precision: str | None, line: CommandLine) -> list[Problem]:
    """What does not go together with parameters that are cast for each call of a layer."""
    if found.get("param_dtype", "fp32") == "fp32":
        return []
    problems, asked = [], f"parallel.param_dtype = {found['param_dtype']}"
    whole = line.setting("parallel.param_dtype=fp32")
    if precision == "fp16":
        true = "bfloat16 has fewer digits than float16, which has a smaller range: both casts together lose both."
        do = f"{line.setting('precision=bf16')}, or: {whole}"
        problems.append(Problem(f"{asked} and precision = fp16", true, do))
    for name, true in (
        (
            "data_parallel_devices",
            "torch.nn.DataParallel copies a model's own parameters, and those that are cast are not.",
        ),
        ("pipeline", "A stage calls parts of the model, and never the layers or the model that would cast them."),
    ):
        if found.get(name, 1) != 1:
            instead = line.setting(f"parallel.{name}=1")
            do = f"{instead}, or: {whole.setting('precision=bf16')}"
            problems.append(Problem(f"{asked} and parallel.{name} = {found[name]}", true, do))
    return problems


def _devices(found: Mapping[str, Any], inside: list[str], line: CommandLine) -> list[Problem]:
    """The devices that are named, if any are, are those that something uses."""
    named = found.get("devices", [])
    if not named or not all(name in found for name in ONE_PROCESS):
        return []
    asked = f"parallel.devices = {named}"
    if not inside:
        do = (
            f"{line.setting(f'parallel.model_parallel_devices={len(named)}')}, or: "
            f"{line.setting('parallel.devices=[]')}"
        )
        return [
            Problem(
                asked,
                "They are for parallel.model_parallel_devices and parallel.data_parallel_devices, which are both 1.",
                do,
            )
        ]
    way = inside[0]
    if len(named) != found[way]:
        do = f"{line.setting(f'parallel.{way}={len(named)}')}, or: {line.setting('parallel.devices=[]')}"
        return [Problem(asked, f"These are {len(named)}, and parallel.{way} = {found[way]}.", do)]
    return []
