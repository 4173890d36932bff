"""A command line that is not understood: what was probably meant, said as the whole line that means it."""

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
    """The function that these flags after this command ask for, and its arguments. Raises SettingsError where they are
    not understood, or where a path is empty.

    `names` gives the settings that may have been meant, as by --batch 64 instead of --set batch=64.
    """
    typed = Suggestions(app, tuple(command), tuple(flags), names)
    try:
        function, bound, _ = app.parse_args(list(flags), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise typed.about(error) from None
    if problems := typed.without_a_path():
        raise SettingsError.of(problems)
    return function, bound


def _whole(_: Any, tokens: Sequence[Token]) -> int:
    return int(tokens[0].value)


WHOLE = Parameter(converter=_whole)
"""A number of things. Left to itself the parser rounds 1.5."""

OPERANDS = {
    "run": ("the name of a recipe, or the path of a script", "text"),
    "check": ("the name of a recipe, or the path of a script", "text"),
    "prove": ("the name of a recipe, or the path of a script", "text"),
    "audit": ("the name of a recipe, the path of a script, or a run directory", "text"),
    "replay": ("a run directory, and a step", "runs/NAME-TIME --step 43"),
    "copy": ("the name of a recipe", "text"),
    "fingerprint": ("a run directory, or one checkpoint", "runs/NAME-TIME"),
    "export": ("a run directory, or one checkpoint, and the file to write", "runs/NAME-TIME model.safetensors"),
}
"""What a verb cannot do without, and an example."""

PATHS = {"--run-dir": "runs/mine", "--settings": "", "--script": ""}
"""Flags that take a path, and an example; "" where the line without the flag is the likelier one."""

EXAMPLES = {"N": "2", "K": "0", "X": "0.001", "LIST": "1MB,16MB", "PLACEMENT": "shard=2"}
"""Of what a flag may be given, by how its help calls that."""

VERBS_ELSEWHERE = {
    **dict.fromkeys(["launch", "train", "fit", "start", "torchrun"], "run"),
    **dict.fromkeys(["env", "info", "test"], "doctor"),
}
"""What verbs are called by accelerate, lightning, torchrun and others."""


@dataclass(frozen=True)
class Suggestions:
    """app       what would be understood
    command   what was typed first: unisono, or python and a script
    flags     what came after it
    names     gives the settings that may have been meant
    """

    app: App
    command: tuple[str, ...]
    flags: tuple[str, ...]
    names: Callable[[], Sequence[str]]

    def about(self, error: CycloptsError) -> SettingsError:
        """What was asked, what is true, what to type."""
        if isinstance(error, UnknownOptionError | UnusedCliTokensError) and (answer := self._of_launchers()):
            return answer
        match error:
            case UnknownOptionError():
                return self._unknown_flag(error.token.keyword or error.token.value)
            case UnknownCommandError():
                return self._unknown_verb()
            case UnusedCliTokensError() if error.unused_tokens:
                return self._homeless(error.unused_tokens)
            case MissingArgumentError() if error.argument is not None and not error.keyword:
                what, example = OPERANDS[self._verb]
                return self._so(f"unisono {self._verb} needs {what}.", [*self.command, self._verb, *example.split()])
            case MissingArgumentError() if error.argument is not None:
                return self._no_value(error.keyword or "", _example(error.argument))
            case CoercionError() if error.token is not None and error.argument is not None:
                return self._misfit(error.token.keyword or "", error.token.value, error.argument)
        return self._so(" ".join(str(error).split()), self._help)

    def without_a_path(self) -> list[Problem]:
        """--run-dir "$OUT", where the shell knows no OUT: the parser would take it for the folder one is in."""
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
        true = "The path is empty; perhaps a variable of the shell is not set."
        without = "" if any(PATHS[flag] for flag in found) else " (without it)"
        return [Problem(f"{flag} ''", true, shlex.join(line) + without) for flag in found]

    def _so(self, true: str, do: Iterable[str], more: str = "") -> SettingsError:
        return SettingsError(shlex.join([*self.command, *self.flags]), true, shlex.join(do) + more)

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
        """The flags that there are here."""
        return _flags_of(self.app[self._verb] if self._verb else self.app)

    @cached_property
    def _names(self) -> list[str]:
        """The settings that can be given here."""
        return list(self.names()) if "--set" in self._known else []

    @property
    def _of_a_script(self) -> bool:
        """Are there arguments that are the script's own?"""
        return self.command[0] == "python" or self._verb == "run"

    def _of_launchers(self) -> SettingsError | None:
        """--nnodes 2, --local_rank 0, -np 4."""
        if not self._verb and self.command[0] == "unisono":
            return None
        known = [*(flag.removeprefix("--") for flag in self._known), *(n.replace("_", "-") for n in self._names)]
        starts = self.command[0] == "python" or "--ranks" in self._known
        found = launcher_flags.answer(launcher_flags.given(self.flags, known), self.command, starts=starts)
        if found is None:
            return None
        true, do = found
        return SettingsError(shlex.join([*self.command, *self.flags]), true, do)

    def _unknown_verb(self) -> SettingsError:
        """unisono rnu train.py."""
        words, verbs = list(self.flags), self._verbs
        place = next((i for i, word in enumerate(words) if not word.startswith("-")), 0)
        word, before, after = words[place], [*self.command, *words[:place]], words[place + 1 :]
        if Path(word).is_file():
            return self._so(f"{word} is a file, and unisono run trains it.", [*before, "run", word, *after])
        if word in recipes():
            return self._so(f"{word} is a recipe, and unisono run trains it.", [*before, "run", word, *after])
        if word in VERBS_ELSEWHERE:
            verb, named = VERBS_ELSEWHERE[word], [each for each in after if not each.startswith("-")]
            example = OPERANDS[verb][1].split() if verb in OPERANDS and not named else []
            given = after if verb in OPERANDS else [each for each in after if each not in named]
            return self._so(f"What {word} is elsewhere is {verb} here.", [*before, verb, *example, *given])
        near = difflib.get_close_matches(word, verbs, 1, 0.5)
        if near:
            return self._so(f"There is no verb {word}; the nearest is {near[0]}.", [*before, near[0], *after])
        return self._so(f"There is no verb {word}. There are {', '.join(verbs)}.", self._help)

    def _unknown_flag(self, flag: str) -> SettingsError:
        """--batch 64, --rank 2, and what is meant for the script."""
        flags = self.flags
        place = next((i for i, word in enumerate(flags) if word.partition("=")[0] == flag.partition("=")[0]), 0)
        typed, equals, value = flags[place].partition("=")
        name = typed.lstrip("-").replace("_", "-")
        before, after = (*self.command, *flags[:place]), flags[place + 1 :]
        if not equals and after and not after[0].startswith("--"):
            value, after = after[0], after[1:]
        setting = name.replace("-", "_")
        near = difflib.get_close_matches(f"--{name}", self._known, 1, 0.75)
        if setting not in self._names and near:
            words = [f"{near[0]}={value}"] if equals else [near[0], *([value] if value else [])]
            return self._so(f"There is no flag {typed}; the nearest is {near[0]}.", (*before, *words, *after))
        if self.command[0] == "python" and difflib.get_close_matches(f"--{name}", ["--ranks"], 1, 0.75):
            line = ("unisono", "run", *self.command[1:], "--ranks", value or "N", *flags[:place], *after)
            return self._so("python starts one process; unisono run starts several.", line)
        if f"{name}.{value.partition('=')[0]}" in self._names:
            true = f"Settings are given with --set; --{name} is a flag of unisono prove."
            return self._so(true, (*before, "--set", f"{name}.{value}", *after))
        others = {known for verb in self._verbs for known in _flags_of(self.app[verb])}
        meant = setting if setting in self._names else None
        if meant is None and f"--{name}" in others:
            true = f"Other verbs have a flag --{name}; {' '.join([*self.command, self._verb])} has none."
            return self._so(true, (*before, *after), " (without it)")
        meant = meant or nearest_name(setting, self._names)
        if meant is not None:
            true = f"There is no flag {typed}, but a setting {meant}, and settings are given with --set."
            return self._so(true, (*before, "--set", f"{meant}={value or 'VALUE'}", *after))
        if self._of_a_script:
            true = f"There is no flag {typed}; what is for the script itself comes after --."
            return self._so(true, (*before, *after, "--", *flags[place : len(flags) - len(after)]))
        return self._so(f"There is no flag {typed}.", self._help)

    def _homeless(self, tokens: Sequence[str]) -> SettingsError:
        """batch=64, --set batch 64, and what is meant for the script."""
        mended, homes = self._with_equals()
        if homes:
            left = [token for token in tokens if token not in homes]
            taken = sum(word not in tokens for word in homes)  # for the target, which was then a word too many
            meant = shlex.join([*self.command, *mended])
            if left[taken:]:
                meant = replace(self, flags=mended)._homeless(left[taken:]).problems[0].do
            asked = shlex.join([*self.command, *self.flags])
            return SettingsError(asked, "--set takes key=value, in one word.", meant)
        more, rest = shlex.join(tokens), list(self.flags)
        for token in tokens:
            rest.remove(token)
        pairs = [token.partition("=") for token in tokens]
        if all(equals and name in self._names for name, equals, _ in pairs):
            do = CommandLine((*self.command, *rest)).setting(*tokens)
            return self._so(f"Settings are given with --set, so `{more}` means nothing.", do.words)
        if self._of_a_script:
            true = f"`{more}` is for the script, and comes after --."
            return self._so(true, (*self.command, *rest, "--", *tokens))
        return self._so(f"There is no place for `{more}`.", self._help)

    def _with_equals(self) -> tuple[tuple[str, ...], list[str]]:
        """The flags with --set lr=0.1 for --set lr 0.1, and the words that are at home now."""
        mended, homes, left = list[str](), list[str](), self.flags if "--set" in self._known else ()
        while left:
            size = 1
            if left[0] == "--set" and len(left) > 2 and "=" not in left[1].rstrip("="):
                size = 4 if left[2] == "=" and len(left) > 3 else 3
            value = left[size - 1].removeprefix("=")
            if size == 1 or value.startswith("--"):
                mended, left = [*mended, left[0]], left[1:]
            else:
                mended, homes = [*mended, "--set", f"{left[1].rstrip('=')}={value}"], [*homes, *left[2:size]]
                left = left[size:]
        return tuple(mended), homes

    def _no_value(self, flag: str, example: str) -> SettingsError:
        """--ranks, and nothing after it."""
        pairs = zip(self.flags, (*self.flags[1:], "--"), strict=True)
        place = next(i for i, (word, then) in enumerate(pairs, 1) if word == flag and then.startswith("-"))
        return self._so(f"{flag} needs a value.", (*self.command, *self.flags[:place], example, *self.flags[place:]))

    def _misfit(self, flag: str, value: str, argument: Argument) -> SettingsError:
        """--ranks two, --json=perhaps."""
        flags = self.flags
        joined, apart = (f"{flag}={value}", f"{flag}{value}"), (flag, value)
        place = next(i for i, word in enumerate(flags) if word in joined or flags[i : i + 2] == apart)
        before, after = (*self.command, *flags[:place], flag), flags[place + (1 if flags[place] in joined else 2) :]
        if argument.hint is bool:
            return self._so(f"{flag} takes no value.", (*before, *after))
        kind = "a number" if argument.hint is float else "a whole number"
        return self._so(f"{flag} takes {kind}, which {value!r} is not.", (*before, _example(argument), *after))


def _example(argument: Argument) -> str:
    """Of what may be given for it."""
    if argument.name == "--cpu-ranks":
        return "1"
    metavar = argument.parameter.metavar or "VALUE"
    return EXAMPLES.get(metavar, metavar)


def _flags_of(app: App) -> list[str]:
    """Those that its help shows."""
    shown = [argument.parameter for argument in app.assemble_argument_collection() if argument.show]
    return [flag for parameter in shown for flag in parameter.name or () if flag.startswith("--")]
