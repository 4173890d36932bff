"""Choose torch's back end: by the device, or by the setting `backend`, which may name one that the script registered.

    torch.distributed.Backend.register_backend("mine", create, devices=["cpu"])      # before unisono.main
    python train.py --set backend=mine

A back end is asked for nothing that would change bits: messages between two processes, gathering, maxima, and sums of
which at most one term is nonzero (or of integers). The order of additions is Unisono's own under `exchange=tree`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from unisono.config import CommandLine
from unisono.distributed.connections.collective_group import TCP, TLS
from unisono.errors import Problem, WorldError

AUTO = "auto"
"""The value of the setting for torch's back end of the device."""

BUILT_IN = ("gloo", "nccl", "xccl", "ucc", "mpi")
"""The back ends that torch may have been built with."""

OWN = (TCP, TLS)
"""Our own back ends (distributed/connections): for many processes, and for secure.transport=tls."""

TAGGED = ("gloo", *OWN)
"""Back ends whose messages have tags, and whose operations fail when a peer is lost."""

RELIED_ON = ("gloo", "nccl", "xccl", *OWN)
"""The back ends whose operations are not tested when a run begins (operations_test.py)."""

NOT_OF_TORCH = ("undefined", "fake", *OWN)
"""Names in torch's list that are no back ends of torch or of the script: two that send nothing, and our own."""

HOST_MEMORY = ("gloo", "mpi", TCP)
"""Back ends whose messages are staged on the CPU. MPI takes tensors of a device only where it was built for that."""


class Transport(NamedTuple):
    """The way of messages.

    Attributes:
        backend: the name of torch's back end.
        staged: whether messages are staged on the CPU.
    """

    backend: str
    staged: bool


MANY = 128
"""From this many processes on, those that send from the CPU connect when they first communicate."""


def choose_transport(name: str, device: torch.device, size: int, *, staged: bool, encrypted: bool = False) -> Transport:
    """Return the back end for the processes of a run.

    Args:
        name: the value of the setting.
        device: the device on which this process computes.
        size: the number of processes.
        staged: whether messages have to be staged on the CPU, because the devices have no back end in common.
        encrypted: whether messages between hosts are encrypted.

    Raises:
        WorldError: the back end does not send from the CPU, and messages have to; or it cannot encrypt.
    """
    if encrypted and (staged or device.type == "cpu" or name in HOST_MEMORY):
        return Transport(TLS, staged=staged or device.type != "cpu")
    if encrypted:
        raise WorldError(
            f"secure.transport = tls does not encrypt what {dist.get_default_backend_for_device(device)} sends.",
            "The libraries of accelerators have no encryption: it is the task of the network that they use "
            "(WireGuard, IPsec, MACsec).",
            "--set secure.transport=plain in an encrypted network; or --set backend=gloo, which sends from the CPU",
        )
    if name == AUTO:
        chosen = "gloo" if staged else dist.get_default_backend_for_device(device)
        return Transport(TCP if chosen == "gloo" and size >= MANY else chosen, staged)
    if name == TCP:
        return Transport(TCP, staged=staged or device.type != "cpu")
    able = dist.Backend.backend_capability.get(name, [])
    if not staged and name not in HOST_MEMORY and device.type in able:
        return Transport(name, staged=False)
    if "cpu" in able:
        return Transport(name, staged=staged or device.type != "cpu")
    raise WorldError(
        f"backend = {name} does not connect these processes.",
        f"It sends tensors of {', '.join(able) or 'no device'}, and the devices of this run need the CPU for messages.",
        "--set backend=gloo",
    )


def available_backends() -> list[str]:
    """Return the back ends that this torch has, and those that the script has registered."""
    names = [name for name in dist.Backend.backend_list if name not in NOT_OF_TORCH]
    return [name for name in names if name not in BUILT_IN or dist.is_backend_available(name)]


def backend_problems(name: str, line: CommandLine) -> list[Problem]:
    """Return why the setting `backend` cannot be used in this process, whose script has been imported.

    Args:
        name: the value of the setting.
        line: the typed command, for messages.
    """
    if name in (AUTO, TCP):
        return []
    names = available_backends()
    have = f"This torch ({torch.__version__}) has {', '.join(name for name in names if name in BUILT_IN) or 'none'}"
    have += f", Unisono has {TCP}"
    own = [other for other in names if other not in BUILT_IN]
    have += f", and the script has registered {', '.join(own)}." if own else "."
    plain = line.setting("backend=auto")
    if name in BUILT_IN and name not in names:
        do = f"{plain}, or install a torch that was built with {name}"
        return [Problem(f"backend = {name} is not in this torch.", have, do)]
    if name not in names:
        call = f'torch.distributed.Backend.register_backend("{name}", create, devices=["cpu"])'
        return [Problem(f"backend = {name} is unknown.", have, f"{call} before unisono.main, or: {plain}")]
    able = dist.Backend.backend_capability.get(name, [])
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if "cpu" in able or (device is not None and device.type in able):
        return []
    facts = f"It sends tensors of {', '.join(able) or 'no device'}; this process computes on {device or 'cpu'}."
    return [Problem(f"backend = {name} does not fit the device.", facts, str(plain))]
