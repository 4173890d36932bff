"""The typed command, and changed versions of it that messages propose."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from unisono.security.masking import mask_words

VALUED = (
    *("--set", "--settings", "--accept-change", "--run-dir", "--ranks", "--cpu-ranks", "--ranks-per-device"),
    *("--image", "--name", "--namespace", "--ranks-per-pod", "--gpus-per-pod", "--gpu-resource", "--cpus", "--memory"),
    *("--claim", "--volume-size", "--storage-class", "--queue", "--topology", "--grace", "--retries"),
    *("--steps", "--parallel", "--tolerance", "--only", "--sizes", "--step", "--virtual-rank", "--script"),
    *("--hosts", "--node", "--meet", "--secret-file", "--address", "--port", "--cert", "--key"),
    *("--nodes", "--ranks-per-node", "--time", "--signal", "--array", "--gpus-per-node", "--cpus-per-task"),
    *("--partition", "--account", "--sbatch", "--write"),
    *("--search", "--trials", "--minimize", "--maximize", "--sampler", "--pruner", "--round-size", "--study-seed"),
    *("--population", "--interval", "--quantile", "--factors", "--resample"),
    *("--storage", "--at-once", "--lr-from", "--lr-to", "--lr-steps", "--page", "--devices", "--price"),
)
"""Flags whose value is the next word."""


@dataclass(frozen=True)
class CommandLine:
    """The words of a command; `str` quotes them for a shell, without secrets. Methods return a changed copy.

    Without words the command is not known, and only the changes are shown: --set lr=1.
    """

    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        return shlex.join(mask_words(self.words))

    def setting(self, *pairs: str, instead_of: str = "") -> CommandLine:
        """Return it with these `--set key=value`, which replace those of the same keys and the pair `instead_of`."""
        names = {pair.partition("=")[0].strip() for pair in pairs}

        def replaced(flag: str, value: str) -> bool:
            return flag == "--set" and (value == instead_of or value.partition("=")[0].strip() in names)

        return self._swap(replaced, [word for pair in pairs for word in ("--set", pair)])

    def flag(self, name: str, value: str = "", instead_of: str = "") -> CommandLine:
        """Return it with this flag; a repeatable flag replaces only the one with the value `instead_of`."""
        new = [name, value] if value else [name]
        return self._swap(lambda flag, v: flag == name and instead_of in ("", v), new)

    def without(self, name: str, value: str = "") -> CommandLine:
        """Return it without this flag, or only without the one with this value."""
        return self._swap(lambda flag, v: flag == name and value in ("", v), [])

    def help(self) -> str:
        """Return the command that lists all settings of the target; "" if the target is not known."""
        if "python" in self.words[:-1]:
            place = self.words.index("python")
            return shlex.join([*self.words[place : place + 2], "--help"])
        if self.words[:1] != ("unisono",):
            return ""
        target = [word for word in self.words[2:4] if word != "--rehearse"]
        return shlex.join(["unisono", "run", *target[:1], "--help"])

    def in_processes(self, count: int) -> CommandLine:
        """Return it with this number of processes, for `unisono run`, `unisono slurm`, srun or mpirun."""
        words = self.words or ("unisono", "run", "SCRIPT")
        if words[:2] == ("unisono", "slurm"):
            nodes = next((int(n) for flag, n in pairwise(words) if flag == "--nodes" and n.isdecimal()), 1) or 1
            nodes = nodes if count % nodes == 0 else 1
            return self.flag("--nodes", str(nodes)).flag("--ranks-per-node", str(count // nodes))
        if words[:2] in (("srun", "-n"), ("mpirun", "-n")):
            return CommandLine((*words[:2], str(count), *words[3:]))
        if words[0] == "python":
            words = ("unisono", "run", *words[1:])
        return CommandLine(words).flag("--ranks", str(count))

    def _swap(self, replaced: Callable[[str, str], bool], new: list[str]) -> CommandLine:
        """Put `new` in place of the first replaced flag, or last. Words after -- belong to the script."""
        end = self.words.index("--") if "--" in self.words else len(self.words)
        front, place, i = list[str](), None, 0
        while i < end:
            count = 2 if self.words[i] in VALUED else 1
            words = self.words[i : min(i + count, end)]
            if replaced(words[0], words[-1] if count == 2 else ""):
                place = len(front) if place is None else place
            else:
                front += words
            i += count
        place = len(front) if place is None else place
        return CommandLine((*front[:place], *new, *front[place:], *self.words[end:]))
