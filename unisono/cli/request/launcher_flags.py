"""Flags of torchrun, accelerate, mpirun, deepspeed and lightning, and what to type here instead."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from unisono.environment import World

FLAGS = {
    "nodes": "nnodes num-nodes nodes num-machines machines",
    "hosts": "hosts host H host-list",
    "host file": "hostfile host-file hosts-file machinefile",
    "address": "master-addr main-process-ip rdzv-endpoint dist-url init-method",
    "port": "master-port main-process-port",
    "node rank": "node-rank machine-rank",
    "processes": "nproc-per-node nproc num-processes np devices gpus num-gpus gpus-per-node ntasks world-size",
    "devices": "gpu-ids device-ids gpu",
    "local rank": "local-rank",
    "back end": "backend dist-backend rdzv-backend rdzv-id rdzv-conf",
    "restarts": "max-restarts",
    "one host": "standalone use-env multi-gpu",
}
"""Names of flags, without dashes, by their meaning."""

MEANINGS = {name: meaning for meaning, names in FLAGS.items() for name in names.split()}
SWITCHES = FLAGS["one host"].split()
SEVERAL_HOSTS = ("nodes", "hosts", "host file", "address", "node rank")
THIS_HOST = re.compile(r"1|(\w+://)?(localhost|127(\.\d+){3})(:.*)?")
"""Values of these flags that stand for this host, or for one host."""

TORCHRUN_PORT = "29500"


class ForeignFlags(NamedTuple):
    """Flags of other launchers on a command line.

    Args:
        flags: the flags as they were typed, by meaning.
        values: their values, by meaning; "" for a flag without one.
        rest: the command line without them.
        place: the index in `rest` where the first of them was.
    """

    flags: dict[str, str]
    values: dict[str, str]
    rest: list[str]
    place: int


class Answer(NamedTuple):
    """The facts about a flag, and the command to type instead."""

    flag: str
    facts: str
    remedy: str


def find(words: Sequence[str], known: Iterable[str]) -> ForeignFlags:
    """Find the flags of other launchers among these words, except those with a name in `known`."""
    flags, values, rest, place = dict[str, str](), dict[str, str](), list[str](), -1
    left, own = list(words), set(known)
    while left:
        word = left.pop(0)
        typed, equals, value = word.partition("=")
        name = typed.lstrip("-").replace("_", "-")
        meaning = MEANINGS.get(name) if typed.startswith("--") or typed in ("-np", "-H") else None
        if meaning is None or name in own:
            rest.append(word)
            continue
        if not equals and name not in SWITCHES and left and not left[0].startswith("-"):
            value = left.pop(0)
        if meaning == "port" or (meaning in SEVERAL_HOSTS and meaning != "node rank" and THIS_HOST.fullmatch(value)):
            values.setdefault(meaning, value)
            meaning = "one host"
        place = len(rest) if place < 0 else place
        flags.setdefault(meaning, typed)
        values.setdefault(meaning, value)
    return ForeignFlags(flags, values, rest, max(place, 0))


def without_local_rank(words: Sequence[str], world: World) -> list[str]:
    """Return a script's arguments without the --local_rank=N of torch.distributed.launch and deepspeed.

    These launchers set torchrun's environment variables, too, so the flag is redundant if it is the rank in `world`.
    """
    own = list(words).index("--") if "--" in words else len(words)
    passed = {f"--local{dash}rank={world.local_rank}" for dash in "-_"} if world.launcher == "torchrun" else set[str]()
    return [word for place, word in enumerate(words) if place >= own or word not in passed]


def answer(found: ForeignFlags, command: tuple[str, ...], *, starts: bool) -> Answer | None:
    """Return what to type instead of these flags; None if there are none.

    Args:
        found: the flags.
        command: the first words: unisono, or python and a script.
        starts: whether the verb takes --ranks. For python and a script, `unisono run` does.
    """
    rest, ranks = _without_ranks(found.rest) if starts else (found.rest, "")
    if any(meaning in found.flags for meaning in SEVERAL_HOSTS):
        return _on_several_hosts(found, [*command, *rest], ranks, starts=starts)
    if starts and {"processes", "devices", "local rank"} & set(found.flags):
        return _on_this_host(found, command, rest, ranks)
    for meaning, facts in (
        ("back end", "The device decides: NCCL for NVIDIA GPUs, gloo for the CPU. --set backend=NAME chooses one."),
        ("restarts", "A process that dies is replaced, and if it cannot be, the run restarts by itself."),
        ("one host", "All processes are started on this host."),
    ):
        if meaning in found.flags:
            return Answer(found.flags[meaning], facts, f"{shlex.join([*command, *found.rest])} (without it)")
    return None


def _without_ranks(words: Sequence[str]) -> tuple[list[str], str]:
    """Return these words without --ranks, and its value; "" if it is not there."""
    kept, ranks, left = list[str](), "", list(words)
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        if flag in ("--ranks", "-n"):
            ranks = value if equals else left.pop(0) if left else ""
        else:
            kept.append(word)
    return kept, ranks


def _on_several_hosts(found: ForeignFlags, line: list[str], ranks: str, *, starts: bool) -> Answer:
    """Return the command for the same job: with ssh where the hosts are listed, otherwise for each host."""
    flag = next(found.flags[meaning] for meaning in SEVERAL_HOSTS if meaning in found.flags)
    verb, ours = " ".join(line[:2]), line[0] == "unisono"
    if not starts:
        return Answer(flag, f"{verb} uses this host only.", f"{shlex.join(line)} (without it)")
    values = found.values
    command = line if ours else ["unisono", "run", *line[1:]]
    facts = f"{'' if ours else 'python starts one process; '}unisono run starts processes on several hosts"
    listed = values.get("host file") or ",".join(filter(None, re.split(r",|(?<=\d)@", values.get("hosts", ""))))
    if listed:
        count = ranks or values.get("processes", "")
        several = ["--hosts", listed, *(["--ranks", count] if count else [])]
        return Answer(flag, f"{facts} with ssh.", shlex.join([*command, *several]))
    nodes = values.get("nodes") or "2"
    each = ranks or values.get("processes") or "2"
    count = str(int(nodes) * int(each)) if nodes.isdecimal() and each.isdecimal() else "4"
    address = re.sub(r"^\w+://", "", values.get("address", "")) or "HOST"
    address += "" if ":" in address else f":{values.get('port') or TORCHRUN_PORT}"
    several = ["--ranks", count, "--nodes", nodes, "--node", values.get("node rank") or "0", "--meet", address]
    do = f"{shlex.join([*command, *several])} on the first host; on the others --node 1, ..."
    return Answer(flag, f"{facts}: the same command on each, with its number.", do)


def _on_this_host(found: ForeignFlags, command: tuple[str, ...], rest: list[str], ranks: str) -> Answer:
    """Return the command that starts as many processes here."""
    flags, count, ours = found.flags, found.values.get("processes", ""), command[0] == "unisono"
    listed = found.values.get("devices", "") or (count if re.fullmatch(r"\d+(,\d+)+", count) else "")
    devices = [number for number in listed.split(",") if number.isdecimal()]
    number = ranks or (str(len(devices)) if devices else count if count.isdecimal() else "2")
    if ours:
        place = min(found.place, len(rest))
        line = [*command, *rest[:place], "--ranks", number, *rest[place:]]
    else:
        line = ["unisono", "run", *command[1:], "--ranks", number, *rest]
    if devices:
        line = ["env", f"CUDA_VISIBLE_DEVICES={','.join(devices)}", *line]
        flag = flags.get("devices") or flags["processes"]
        return Answer(flag, "Devices are selected with CUDA_VISIBLE_DEVICES.", shlex.join(line))
    flag = flags.get("processes") or flags.get("local rank") or flags["devices"]
    facts = "python starts one process; unisono run starts several."
    if "processes" in flags and ours:
        facts = "--ranks is the number of processes."
    elif "local rank" in flags:
        facts = "Launchers pass it to each process that they start."
    return Answer(flag, facts, shlex.join(line))
