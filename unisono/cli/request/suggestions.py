"""Answer a command line that cannot be parsed with the one that was probably meant."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import BoundArguments
from pathlib import Path
from typing import Any

from cyclopts import (
    App,
    Argument,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    Token,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from unisono.cli.request import launcher_flags
from unisono.cli.request.target import recipes
from unisono.config import CommandLine, nearest_name
from unisono.errors import Problem, SettingsError


def parsed(
    app: App, command: Sequence[str], flags: Sequence[str], names: Callable[[], Sequence[str]]
) -> tuple[Callable[..., Any], BoundArguments]:
    """Return the function that a command line calls, and its arguments.

    Args:
        app: the parser.
        command: the first words: unisono, or python and a script.
        flags: the words after them.
        names: returns the settings that may have been meant, as by --batch 64 instead of --set batch=64.

    Raises:
        SettingsError: if the command line cannot be parsed, or has an empty path.
    """
    suggestions = Suggestions(app, tuple(command), tuple(flags), names)
    try:
        function, bound, _ = app.parse_args(list(flags), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise suggestions.answer(error) from None
    if problems := suggestions.empty_paths():
        raise SettingsError.of(problems)
    return function, bound


def _whole(_: Any, tokens: Sequence[Token]) -> int:
    return int(tokens[0].value)


WHOLE = Parameter(converter=_whole)
"""A number of things. By default the parser rounds 1.5."""

OPERANDS = {
    **dict.fromkeys(
        ["run", "slurm", "kubernetes", "ray", "check", "prove"],
        ("the name of a recipe, or the path of a script", "text"),
    ),
    "audit": ("the name of a recipe, the path of a script, or a run directory", "text"),
    "replay": ("a run directory, and a step", "runs/NAME-TIME --step 43"),
    "copy": ("the name of a recipe", "text"),
    "convert": ("the path of a script", "train.py"),
    "shards": ("a folder of files, and the folder to write", "pictures shards"),
    "fingerprint": ("a run directory, or a checkpoint", "runs/NAME-TIME"),
    "export": ("a run directory, or a checkpoint, and the file to write", "runs/NAME-TIME model.safetensors"),
    "predict": ("a run directory, the data, and the file to write", "runs/NAME-TIME texts.txt labels.jsonl"),
    "watch": ("a run directory, or a folder of runs", "runs"),
    **dict.fromkeys(["top", "logs", "profile"], ("a run directory", "runs/NAME-TIME")),
}
"""The required arguments of each verb, and an example."""

PATHS = {"--run-dir": "runs/mine", "--settings": "", "--script": ""}
"""Flags that take a path, and an example; "" if the command without the flag is the likelier one."""

EXAMPLES = {"N": "2", "K": "0", "X": "0.001", "LIST": "1MB,16MB", "LAYOUT": "shard=2"}
EXAMPLES |= {"SIZE": "1GB", "SECONDS": "120", "LIMIT": "12:00:00", "INDICES": "0-7"}
"""A valid value for each placeholder in the help."""

VERBS_ELSEWHERE = {
    **dict.fromkeys(["launch", "train", "fit", "start", "torchrun"], "run"),
    **dict.fromkeys(["env", "info", "test"], "doctor"),
}
"""Verbs of accelerate, lightning, torchrun and others."""

FOR_SCRIPT = "Arguments of the script itself come after --."


@dataclass(frozen=True)
class Suggestions:
    """Corrections of one command line; see `parsed` for the attributes."""

    app: App
    command: tuple[str, ...]
    flags: tuple[str, ...]
    names: Callable[[], Sequence[str]]

    def answer(self, error: CycloptsError) -> SettingsError:
        """Return the error that the user sees for an error of the parser."""
        if isinstance(error, UnknownOptionError | UnusedCliTokensError) and (found := self._launcher_flag()):
            return SettingsError(f"There is no flag {found.flag}.", found.facts, found.remedy)
        match error:
            case UnknownOptionError():
                return self._unknown_flag(error.token.keyword or error.token.value)
            case UnknownCommandError():
                return self._unknown_verb()
            case UnusedCliTokensError() if error.unused_tokens:
                return self.unexpected(error.unused_tokens)
            case MissingArgumentError() if error.argument is not None and not error.keyword:
                what, example = OPERANDS[self._verb]
                words = [*self.command, self._verb, *example.split()]
                return _error(f"unisono {self._verb} needs {what}.", "The command line has none.", words)
            case MissingArgumentError() if error.argument is not None:
                return self._no_value(error.keyword or "", _example(error.argument))
            case CoercionError() if error.token is not None and error.argument is not None:
                return self._invalid_value(error.token.keyword or "", error.token.value, error.argument)
        return _error(" ".join(str(error).split()), "The command line cannot be parsed.", self._help)

    def empty_paths(self) -> list[Problem]:
        """Return a problem for --run-dir "$OUT" if the shell has no variable OUT. The parser takes "" for "."."""
        found, line, left = [], self.command, self.flags
        while left:
            (word, *_), then = left, left[1:2]
            flag, equals, value = word.partition("=")
            name = flag.replace("_", "-")
            size = 1 if equals or name not in PATHS else 2
            if name in PATHS and not (value if equals else "".join(then)):
                found.append(name)
                line = (*line, name, PATHS[name]) if PATHS[name] else line
            else:
                line = (*line, *left[:size])
            left = left[size:]
        without = "" if any(PATHS[flag] for flag in found) else " (without it)"
        facts = "Perhaps a variable of the shell is not set."
        return [Problem(f"{flag} has an empty path.", facts, shlex.join(line) + without) for flag in found]

    @property
    def _verb(self) -> str:
        return self.flags[0] if self.flags and self.flags[0] in self._verbs else ""

    @property
    def _verbs(self) -> list[str]:
        return [name for name in self.app if not name.startswith("-")]

    @property
    def _help(self) -> tuple[str, ...]:
        return (*self.command, *self.flags[: 1 if self._verb else 0], "--help")

    @cached_property
    def _known(self) -> list[str]:
        """The flags of this verb."""
        return _flags_of(self.app[self._verb] if self._verb else self.app)

    @cached_property
    def _names(self) -> list[str]:
        """The settings that this verb takes."""
        return list(self.names()) if "--set" in self._known else []

    @property
    def _takes_script_arguments(self) -> bool:
        return self.command[0] == "python" or self._verb in ("run", "slurm", "ray")

    def _launcher_flag(self) -> launcher_flags.Answer | None:
        """Answer a flag of another launcher: --nnodes 2, --local_rank 0, -np 4."""
        if not self._verb and self.command[0] == "unisono":
            return None
        known = {flag.removeprefix("--") for flag in self._known}
        if launcher_flags.find(self.flags, known).flags:
            known |= {name.replace("_", "-") for name in self._names}
        found = launcher_flags.find(self.flags, known)
        return launcher_flags.answer(
            found, self.command, starts=self.command[0] == "python" or "--ranks" in self._known
        )

    def _unknown_verb(self) -> SettingsError:
        """Answer `unisono rnu train.py`."""
        words, verbs = list(self.flags), self._verbs
        place = next((i for i, word in enumerate(words) if not word.startswith("-")), 0)
        word, before, after = words[place], [*self.command, *words[:place]], words[place + 1 :]
        error = f"There is no command {word}."
        if Path(word).is_file() or word in recipes():
            kind = "recipe" if not Path(word).is_file() else "script"
            return _error(error, f"{word} is a {kind}, and unisono run trains it.", [*before, "run", word, *after])
        if word in VERBS_ELSEWHERE:
            verb, operands = VERBS_ELSEWHERE[word], [each for each in after if not each.startswith("-")]
            example = OPERANDS[verb][1].split() if verb in OPERANDS and not operands else []
            kept = after if verb in OPERANDS else [each for each in after if each not in operands]
            return _error(error, f"unisono {verb} does that.", [*before, verb, *example, *kept])
        near = difflib.get_close_matches(word, verbs, 1, 0.5)
        if near:
            return _error(error, f"The nearest command is {near[0]}.", [*before, near[0], *after])
        return _error(error, f"The commands are {', '.join(verbs)}.", self._help)

    def _unknown_flag(self, flag: str) -> SettingsError:
        """Answer --batch 64, --rank 2, and a flag of the script."""
        flags = self.flags
        place = next((i for i, word in enumerate(flags) if word.partition("=")[0] == flag.partition("=")[0]), 0)
        typed, equals, value = flags[place].partition("=")
        name = typed.lstrip("-").replace("_", "-")
        before, after = (*self.command, *flags[:place]), flags[place + 1 :]
        if not equals and after and not after[0].startswith("--"):
            value, after = after[0], after[1:]
        error, setting = f"There is no flag {typed}.", name.replace("-", "_")
        near = difflib.get_close_matches(f"--{name}", self._known, 1, 0.75)
        if near and setting not in self._names:
            words = [f"{near[0]}={value}"] if equals else [near[0], *([value] if value else [])]
            return _error(error, f"The nearest flag is {near[0]}.", (*before, *words, *after))
        if self.command[0] == "python" and difflib.get_close_matches(f"--{name}", ["--ranks"], 1, 0.75):
            line = ("unisono", "run", *self.command[1:], "--ranks", value or "N", *flags[:place], *after)
            return _error(error, "python starts one process; unisono run starts several.", line)
        if f"{name}.{value.partition('=')[0]}" in self._names:
            facts = f"--{name} is a flag of unisono prove; settings are given with --set."
            return _error(error, facts, (*before, "--set", f"{name}.{value}", *after))
        if setting not in self._names and any(f"--{name}" in _flags_of(self.app[verb]) for verb in self._verbs):
            facts = f"Other verbs have it; {' '.join([*self.command, self._verb])} does not."
            return _error(error, facts, (*before, *after), " (without it)")
        meant = setting if setting in self._names else nearest_name(setting, self._names)
        if meant is not None:
            facts = f"{meant} is a setting; settings are given with --set."
            return _error(error, facts, (*before, "--set", f"{meant}={value or 'VALUE'}", *after))
        if self._takes_script_arguments:
            own = flags[place : len(flags) - len(after)]
            return _error(error, FOR_SCRIPT, (*before, *after, "--", *own))
        return _error(error, f"The flags are {', '.join(self._known)}.", self._help)

    def unexpected(self, tokens: Sequence[str]) -> SettingsError:
        """Answer batch=64, --set batch 64, and an argument of the script."""
        joined, parts, name = self._with_equals()
        if parts:
            left = [token for token in tokens if token not in parts]
            taken = sum(word not in tokens for word in parts)  # the parser took them for the target
            meant = shlex.join([*self.command, *joined])
            if left[taken:]:
                rest = replace(self, flags=joined)
                meant = rest.unexpected(left[taken:]).problems[0].remedy
            return SettingsError(f"--set {name} has no value.", "--set takes key=value, in one word.", meant)
        error, kept = f"Unexpected argument: {shlex.join(tokens)}", list(self.flags)
        for token in tokens:
            kept.remove(token)
        pairs = [token.partition("=") for token in tokens]
        if all(equals and name in self._names for name, equals, _ in pairs):
            line = CommandLine((*self.command, *kept)).setting(*tokens)
            return _error(error, "Settings are given with --set.", line.words)
        if self._takes_script_arguments:
            return _error(error, FOR_SCRIPT, (*self.command, *kept, "--", *tokens))
        return _error(error, f"{' '.join(self._help[:-1])} takes no such argument.", self._help)

    def _with_equals(self) -> tuple[tuple[str, ...], list[str], str]:
        """Return the flags with --set lr=0.1 for --set lr 0.1, the words that were joined, and the first name."""
        joined, parts, first, left = list[str](), list[str](), "", self.flags if "--set" in self._known else ()
        while left:
            size = 1
            if left[0] == "--set" and len(left) > 2 and "=" not in left[1].rstrip("="):
                size = 4 if left[2] == "=" and len(left) > 3 else 3
            value = left[size - 1].removeprefix("=")
            if size == 1 or value.startswith("--"):
                joined, left = [*joined, left[0]], left[1:]
            else:
                name = left[1].rstrip("=")
                joined, parts, first = [*joined, "--set", f"{name}={value}"], [*parts, *left[2:size]], first or name
                left = left[size:]
        return tuple(joined), parts, first

    def _no_value(self, flag: str, example: str) -> SettingsError:
        """Answer --ranks without a value."""
        pairs = zip(self.flags, (*self.flags[1:], "--"), strict=True)
        place = next(i for i, (word, then) in enumerate(pairs, 1) if word == flag and then.startswith("-"))
        line = (*self.command, *self.flags[:place], example, *self.flags[place:])
        return _error(f"{flag} has no value.", f"It takes a value, such as {example}.", line)

    def _invalid_value(self, flag: str, value: str, argument: Argument) -> SettingsError:
        """Answer --ranks two and --json=perhaps."""
        flags = self.flags
        joined, apart = (f"{flag}={value}", f"{flag}{value}"), (flag, value)
        place = next(i for i, word in enumerate(flags) if word in joined or flags[i : i + 2] == apart)
        before, after = (*self.command, *flags[:place], flag), flags[place + (1 if flags[place] in joined else 2) :]
        error = f"Invalid value for {flag}: {value}"
        if argument.hint is bool:
            return _error(error, f"{flag} takes no value.", (*before, *after))
        kind = "a number" if argument.hint is float else "a whole number"
        return _error(error, f"{flag} takes {kind}.", (*before, _example(argument), *after))


def _error(error: str, facts: str, words: Iterable[str], comment: str = "") -> SettingsError:
    return SettingsError(error, facts, shlex.join(words) + comment)


def _example(argument: Argument) -> str:
    """Return a valid value of an argument."""
    if argument.name == "--cpu-ranks":
        return "1"
    metavar = argument.parameter.metavar or "VALUE"
    return EXAMPLES.get(metavar, metavar)


def _flags_of(app: App) -> list[str]:
    """Return the flags that the help of a verb shows."""
    visible = [argument.parameter for argument in app.assemble_argument_collection() if argument.show]
    return [flag for parameter in visible for flag in parameter.name or () if flag.startswith("--")]
