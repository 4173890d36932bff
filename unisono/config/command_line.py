"""The typed command, and changed versions of it that messages propose."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from unisono.errors import Problem
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

        return self.swapped(replaced, [word for pair in pairs for word in ("--set", pair)])

    def flag(self, name: str, value: str = "", instead_of: str = "") -> CommandLine:
        """Return it with this flag; a repeatable flag replaces only the one with the value `instead_of`."""
        new = [name, value] if value else [name]
        return self.swapped(lambda flag, v: flag == name and instead_of in ("", v), new)

    def without(self, name: str, value: str = "") -> CommandLine:
        """Return it without this flag, or only without the one with this value."""
        return self.swapped(lambda flag, v: flag == name and value in ("", v), [])

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

    def swapped(self, replaced: Callable[[str, str], bool], new: list[str]) -> CommandLine:
        """Put `new` in place of the first replaced flag, or last. Words after -- belong to the script."""
        front, place = list[str](), None
        for item in _items(self.words):
            if item[0] == "--":
                break
            if replaced(item[0], item[1] if len(item) == 2 else ""):
                place = len(front) if place is None else place
            else:
                front += item
        place = len(front) if place is None else place
        rest = self.words[self.words.index("--") :] if "--" in self.words else ()
        return CommandLine((*front[:place], *new, *front[place:], *rest))


def merge_corrections(problems: Sequence[Problem], line: CommandLine) -> list[Problem]:
    """Return the problems, each with a command that also corrects the others.

    A remedy can be one command or several alternatives, "COMMAND (from the start), or: COMMAND". Each alternative gets
    the first correction of every other problem. Remedies that are no changed version of the typed command remain.

    Args:
        problems: what is wrong with a request.
        line: the typed command.
    """
    typed = CommandLine(tuple(mask_words(line.words)))
    remedies = [[_Alternative.read(text, typed) for text in OR.split(problem.remedy)] for problem in problems]
    first = [correction for (alternative, *_) in remedies if (correction := alternative.correction)]
    if len(first) < 2:
        return list(problems)
    return [
        problem._replace(remedy="".join(alternative.text(typed, first) for alternative in alternatives))
        for problem, alternatives in zip(problems, remedies, strict=True)
    ]


OR = re.compile(r"(, or(?: \([^()]*\))?: )")
"""Separates the alternatives of a remedy."""

REPEATABLE = ("--accept-change", "--search", "--sbatch")
"""Flags that a command can have several times."""


class _Correction(NamedTuple):
    """How a proposed command differs from the typed one.

    Args:
        words: pairs of words, the typed one and the one in its place.
        flags: pairs of flags with their values, the typed one and the one in its place; (): there is none.
    """

    words: tuple[tuple[str, str], ...]
    flags: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]

    @staticmethod
    def between(typed: CommandLine, proposed: Sequence[str]) -> _Correction | None:
        """Return the correction; None if the proposed words are no changed version of the typed command."""
        before, after = _items(typed.words), _items(proposed)
        words, new_words = ([item[0] for item in items if item[0][:1] != "-"] for items in (before, after))
        if len(words) != len(new_words) or words[:2] != new_words[:2] or ("--help",) in after:
            return None
        pairs = tuple(pair for pair in zip(words, new_words, strict=True) if pair[0] != pair[1])
        removed = [item for item in before if item[0][:1] == "-" and item not in after]
        added = [item for item in after if item[0][:1] == "-" and item not in before]
        flags = []
        for new in added:
            old = next((item for item in removed if _key(item) == _key(new)), None)
            old = old or next((item for item in removed if item[0] == new[0]), ())
            removed = [item for item in removed if item != old]
            flags.append((old, new))
        flags += [(old, ()) for old in removed]
        return _Correction(pairs, tuple(flags)) if pairs or flags else None

    def applied(self, line: CommandLine) -> CommandLine:
        """Return a command with this correction, in place of another one of the same word, flag or setting."""
        changed = dict(self.words)
        line = CommandLine(tuple(changed.get(word, word) for word in line.words)) if changed else line
        for old, new in self.flags:
            line = line.swapped(partial(_is_replaced, old, new), list(new))
        return line


class _Alternative(NamedTuple):
    """One alternative of a remedy: a command, or None and the text as it is.

    Args:
        correction: how the command differs from the typed one.
        rest: what follows the command, as in " (from the start)", or the whole text.
    """

    correction: _Correction | None
    rest: str

    @staticmethod
    def read(text: str, typed: CommandLine) -> _Alternative:
        command, parenthesis, rest = text.partition(" (")
        try:
            correction = _Correction.between(typed, shlex.split(command))
        except ValueError:  # a quotation mark of a sentence
            correction = None
        return _Alternative(correction, parenthesis + rest if correction else text)

    def text(self, typed: CommandLine, others: Iterable[_Correction]) -> str:
        """Return the text, with the corrections of other problems in the command."""
        if self.correction is None:
            return self.rest
        line = typed
        for correction in (*others, self.correction):
            line = correction.applied(line)
        return f"{line}{self.rest}"


def _items(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Return flags with their values, and other words alone. Words after -- belong to the script."""
    items, i = list[tuple[str, ...]](), 0
    end = list(words).index("--") if "--" in words else len(words)
    while i < end:
        count = 2 if words[i] in VALUED else 1
        items.append(tuple(words[i : min(i + count, end)]))
        i += count
    return items + [(word,) for word in words[end:]]


def _is_replaced(old: tuple[str, ...], new: tuple[str, ...], flag: str, value: str) -> bool:
    """Return whether a flag with its value is the old one, or has the key of the new one."""
    item = (flag, value) if value else (flag,)
    return item == old or (bool(new) and _key(item) == _key(new))


def _key(item: tuple[str, ...]) -> tuple[str, ...]:
    """Return the part of a flag that a command can have only once: the name of a setting, or a flag."""
    flag, value = item[0], item[-1]
    return (flag, value.partition("=")[0].strip()) if flag == "--set" else item if flag in REPEATABLE else (flag,)
