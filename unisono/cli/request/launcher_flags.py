"""Flags of other launchers (torchrun, accelerate, mpirun, deepspeed, lightning), and what each of them is here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from unisono.environment import World

NODES, HOSTS, FILE, ADDRESS, PORT, NODE = "nodes", "hosts", "file", "address", "port", "node"
COUNT, DEVICES, LOCAL_RANK = "count", "devices", "local_rank"
BACKEND, RESTARTS, ONE_HOST = "backend", "restarts", "one_host"

KINDS = {
    **dict.fromkeys(["nnodes", "num-nodes", "nodes", "num-machines", "machines"], NODES),
    **dict.fromkeys(["hosts", "host", "H", "host-list"], HOSTS),
    **dict.fromkeys(["hostfile", "host-file", "hosts-file", "machinefile"], FILE),
    **dict.fromkeys(["master-addr", "main-process-ip", "rdzv-endpoint", "dist-url", "init-method"], ADDRESS),
    **dict.fromkeys(["master-port", "main-process-port"], PORT),
    **dict.fromkeys(["node-rank", "machine-rank"], NODE),
    **dict.fromkeys(["nproc-per-node", "nproc", "num-processes", "np", "devices", "gpus", "num-gpus"], COUNT),
    **dict.fromkeys(["gpus-per-node", "ntasks", "world-size"], COUNT),
    **dict.fromkeys(["gpu-ids", "device-ids", "gpu"], DEVICES),
    "local-rank": LOCAL_RANK,
    **dict.fromkeys(["backend", "dist-backend", "rdzv-backend", "rdzv-id", "rdzv-conf"], BACKEND),
    "max-restarts": RESTARTS,
    **dict.fromkeys(["standalone", "use-env", "multi-gpu"], ONE_HOST),
}
"""What a flag says, by its name without dashes."""

SEVERAL_HOSTS = (NODES, HOSTS, FILE, ADDRESS, NODE)
HERE = re.compile(r"1|(\w+://)?(localhost|127(\.\d+){3})(:.*)?")
"""Values of these flags that name this host, or one host."""

SWITCHES = ("standalone", "use-env", "multi-gpu")
"""Flags without a value."""

PORT_OF_TORCHRUN = "29500"


class LauncherFlag(NamedTuple):
    """Flags of other launchers on a command line.

    flags   as they were typed, by kind
    values  of these flags, by kind; "" where there was none
    rest    the command line without them
    place   where the first of them was, in `rest`
    """

    flags: dict[str, str]
    values: dict[str, str]
    rest: list[str]
    place: int


def given(words: Sequence[str], known: Iterable[str]) -> LauncherFlag:
    """Find the flags of other launchers among these words, except those whose name is `known` here."""
    flags, values, rest, place = dict[str, str](), dict[str, str](), list[str](), -1
    left, own = list(words), set(known)
    while left:
        word = left.pop(0)
        typed, equals, value = word.partition("=")
        name = typed.lstrip("-").replace("_", "-")
        dashes = typed.startswith("--") or typed in ("-np", "-H")
        kind = KINDS.get(name) if dashes and name not in own else None
        if kind is None:
            rest.append(word)
            continue
        if not equals and name not in SWITCHES and left and not left[0].startswith("-"):
            value = left.pop(0)
        if kind == PORT or (kind in SEVERAL_HOSTS and kind != NODE and HERE.fullmatch(value)):
            values.setdefault(kind, value)
            kind = ONE_HOST
        place = len(rest) if place < 0 else place
        flags.setdefault(kind, typed)
        values.setdefault(kind, value)
    return LauncherFlag(flags, values, rest, max(place, 0))


def without_local_rank(words: Sequence[str], world: World) -> list[str]:
    """A script's command line without the --local_rank=N that torch.distributed.launch and deepspeed pass, if it is the
    local rank of `world`. These launchers set the variables of torchrun as well."""
    own = list(words).index("--") if "--" in words else len(words)
    passed = {f"--local{dash}rank={world.local_rank}" for dash in "-_"} if world.launcher == "torchrun" else set[str]()
    return [word for place, word in enumerate(words) if place >= own or word not in passed]


def spread(found: LauncherFlag, ranks: str) -> tuple[str, ...]:
    """The words of torchrun that start `ranks` processes ("": the count that was given, or 2) on each host."""
    values = found.values
    hosts = [host.rpartition("@")[2].partition(":")[0] for host in re.split("[,@]", values.get(HOSTS, "")) if host]
    nodes = values.get(NODES) or (str(len(hosts)) if hosts else "2")
    address = re.sub(r"^\w+://", "", values.get(ADDRESS, "")) or (hosts[0] if hosts else "HOST")
    if ":" not in address:
        address += f":{values.get(PORT) or PORT_OF_TORCHRUN}"
    each = ranks or values.get(COUNT) or "2"
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", address)
    return ("torchrun", "--nnodes", nodes, "--nproc-per-node", each, *rendezvous)


def answer(found: LauncherFlag, command: tuple[str, ...], *, starts: bool) -> tuple[str, str] | None:
    """What is true of these flags, and what to type; None: there are none.

    command  what was typed first: unisono, or python and a script
    starts   does this verb take --ranks? (python and a script: `unisono run` does)
    """
    rest, ranks = _without_ranks(found.rest) if starts else (found.rest, "")
    if any(kind in found.flags for kind in SEVERAL_HOSTS):
        return _several_hosts(found, command, rest, ranks, starts=starts)
    without = f"{shlex.join([*command, *found.rest])} (without it)"
    if {COUNT, DEVICES, LOCAL_RANK} & set(found.flags):
        return _one_host(found, command, rest, ranks) if starts else None
    if BACKEND in found.flags:
        true = f"{found.flags[BACKEND]} is not needed: the device decides (NCCL for NVIDIA's, gloo for the CPU)."
        return true, without
    if RESTARTS in found.flags:
        return "A process that dies is replaced; where it cannot be, the run begins again by itself.", without
    if ONE_HOST in found.flags:
        return f"{found.flags[ONE_HOST]} is not needed: all processes are started on this host.", without
    return None


def _without_ranks(words: Sequence[str]) -> tuple[list[str], str]:
    """These words without --ranks, and its value ("": it is not there)."""
    kept, ranks, left = list[str](), "", list(words)
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        if flag in ("--ranks", "-n"):
            ranks = value if equals else left.pop(0) if left else ""
        else:
            kept.append(word)
    return kept, ranks


def _several_hosts(
    found: LauncherFlag, command: tuple[str, ...], rest: list[str], ranks: str, *, starts: bool
) -> tuple[str, str]:
    line, ours = [*command, *rest], command[0] == "unisono"
    flag = next(found.flags[kind] for kind in SEVERAL_HOSTS if kind in found.flags)
    if not starts:
        return f"{' '.join(line[:2])} uses this host only, without {flag}.", f"{shlex.join(line)} (without it)"
    starter = f"{' '.join(line[:2])} starts processes on this host only" if ours else "python starts one process"
    words = spread(found, ranks)
    do = f"{shlex.join([*words, *(['--no-python', *line] if ours else line[1:])])} on each host; under Slurm: "
    nodes, each = words[2], words[4]
    tasks = str(int(nodes) * int(each)) if nodes.isdecimal() and each.isdecimal() else "4"
    true = f"{starter}; {flag} is for torchrun or srun, which start processes on several."
    return true, do + shlex.join(["srun", "-N", nodes, "-n", tasks, *line])


def _one_host(found: LauncherFlag, command: tuple[str, ...], rest: list[str], ranks: str) -> tuple[str, str]:
    flags, values, ours = found.flags, found.values, command[0] == "unisono"
    count = values.get(COUNT, "")
    listed = values.get(DEVICES, "") or (count if re.fullmatch(r"\d+(,\d+)+", count) else "")
    devices = [number for number in listed.split(",") if number.isdecimal()]
    number = ranks or (str(len(devices)) if devices else count if count.isdecimal() else "2")
    if ours:
        at = min(found.place, len(rest))
        line = [*command, *rest[:at], "--ranks", number, *rest[at:]]
    else:
        line = ["unisono", "run", *command[1:], "--ranks", number, *rest]
    if devices:
        true = f"{flags.get(DEVICES) or flags[COUNT]} {listed} names devices: here CUDA_VISIBLE_DEVICES does."
        return true, shlex.join(["env", f"CUDA_VISIBLE_DEVICES={','.join(devices)}", *line])
    if COUNT in flags and ours:
        return f"What {flags[COUNT]} is elsewhere is --ranks here.", shlex.join(line)
    if LOCAL_RANK in flags:
        return f"{flags[LOCAL_RANK]} is what a launcher passes to each process that it starts.", shlex.join(line)
    return "python starts one process; unisono run starts several.", shlex.join(line)
