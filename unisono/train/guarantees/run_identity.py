"""The identity of a run: the settings and the machine that its bits depend on. Compared between ranks and at resume."""

from __future__ import annotations

import os
import platform
import socket
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unisono import __version__, environment
from unisono.config import ENVIRONMENT, CommandLine
from unisono.distributed.process_group import ProcessGroup
from unisono.errors import Problem, WorldError

RUN = "run"
"""The field of the identity with the id of the run. It is made at the start, and every resume keeps it."""


def new_run() -> str:
    """Return the id of a run that begins: 32 hexadecimal digits."""
    return uuid.uuid4().hex


def foreign_checkpoint(path: Path, saved: Any, own: str | None, line: CommandLine) -> list[Problem]:
    """Return a problem if a checkpoint belongs to another run.

    Args:
        path: the checkpoint.
        saved: the id of the run that saved it.
        own: the id of the run in whose directory it is; None: the directory does not say.
        line: the typed command, for messages.
    """
    if own is None or saved == own:
        return []
    return [
        Problem(
            f"Cannot resume from {path}: it belongs to another run.",
            f"The run {saved!a:.40} has saved it, and this is the run {own!r}.",
            f"move it to another folder; or, to continue that run here: {line.flag('--accept-change', RUN)}",
        )
    ]


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return the facts about this process's machine that environment.json holds."""
    return {
        "unisono": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": device.type if device.type == "cpu" else torch.get_device_module(device).get_device_name(device),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "variables": environment.variables(
            (
                *("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUBLAS_WORKSPACE_CONFIG", "ATEN_CPU_CAPABILITY"),
                "PYTHONHASHSEED",
            )
        ),
    }


def processor() -> str:
    """Return the kind of processor and the sizes of its caches.

    Libraries of linear algebra choose and block their kernels by them: with the same instruction set, two generations
    of processors of one vendor gave different bits (docs/design/decisions/alignment.md).
    """
    try:
        lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()]
    except OSError:
        return platform.processor() or platform.machine()
    known = {name.strip(): value.strip() for name, _, value in lines}
    kind = [known[name] for name in ("vendor_id", "CPU implementer", "CPU part") if name in known]
    kind += [f"{word} {known[name]}" for name, word in (("cpu family", "family"), ("model", "model")) if name in known]
    caches = Path("/sys/devices/system/cpu/cpu0/cache")
    sizes = [
        (index / "size").read_text().strip()
        for index in sorted(caches.glob("index*"))
        if (index / "size").is_file() and (index / "type").read_text().strip() != "Instruction"
    ]
    return " ".join([*(kind or [platform.machine()]), *(["caches", "+".join(sizes)] if sizes else [])])


def compare(before: dict[str, Any], now: dict[str, Any], accepted: list[str], command: str) -> list[Problem]:
    """Return a problem for every field in which a resumed run differs from the run before.

    Args:
        before: settings that change the bits, by name, and the fields of ENVIRONMENT, of the run before.
        now: the same fields of this run.
        accepted: names of changes that the user accepts.
        command: the command that the user typed. Each problem shows it with all changes accepted.
    """
    differ = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    open_ones = [name for name in differ if name not in accepted]
    accept = "".join(f" --accept-change {name}" for name in open_ones)
    return [
        Problem(
            f"Cannot resume with {name} = {now.get(name)}.",
            f"The run was begun with {name} = {before.get(name)}, and the result depends on it.",
            f"continue with {name} = {before.get(name)}; or, for other bits from here on: {command}{accept}",
        )
        for name in open_ones
    ]


def agree(group: ProcessGroup, mine: dict[str, Any]) -> list[str]:
    """Return descriptions of what differs between the processes, so that no equal bits can be promised.

    Raises:
        WorldError: the processes use different numbers of threads.
    """
    by_process = group.all_gather_object({name: mine[name] for name in ENVIRONMENT})
    differences = []
    for name in ENVIRONMENT:
        values = [facts[name] for facts in by_process]
        if len(set(values)) > 1:
            by_rank = ", ".join(
                f"{value} on rank {rank}" for rank, value in enumerate(values) if values.index(value) == rank
            )
            if name == "threads":
                raise WorldError(
                    "The processes of a run must use the same number of threads.",
                    f"They use {by_rank}.",
                    "leave torch.set_num_threads to the setting `threads`.",
                )
            differences.append(f"{name} differs between processes: {by_rank}")
    return differences
