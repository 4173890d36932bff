"""Samplers and pruners of Optuna by name, with options: tpe, median(n_startup_trials=4), gp, hyperband.

A name is that of the class in lower case, without "Sampler" or "Pruner".
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import optuna

from unisono.config import CommandLine, nearest_name
from unisono.errors import Problem, SettingsError

ABSTRACT = ("BaseSampler", "BaseGASampler", "PartialFixedSampler", "BasePruner", "NopPruner")
"""Classes that are no choice of their own."""

PACKAGES = {"cmaes": ("cmaes",), "gp": ("scipy",)}
"""Packages that samplers import only once they draw."""

EXAMPLES = {
    "patient": "patient(patience=3)",
    "percentile": "percentile(percentile=25.0)",
    "threshold": "threshold(upper=10.0)",
}
"""Pruners that have no default for some option."""

NONE = "none"
"""The name for running without a pruner."""


def _classes(module: Any, suffix: str) -> dict[str, type]:
    """Return the classes of a module of Optuna by their names here."""
    found = {name: getattr(module, name) for name in dir(module) if name.endswith(suffix) and name not in ABSTRACT}
    return {name.removesuffix(suffix).lower(): kind for name, kind in found.items()}


SAMPLERS = _classes(optuna.samplers, "Sampler")
PRUNERS = {**_classes(optuna.pruners, "Pruner"), NONE: optuna.pruners.NopPruner}


def parse_variant(flag: str, text: str, line: CommandLine) -> tuple[str, dict[str, Any]]:
    """Return name and options of a sampler or a pruner.

    Args:
        flag: "--sampler" or "--pruner".
        text: Its value.
        line: The typed command, for messages.

    Raises:
        SettingsError: There is no such sampler, pruner or option.
    """
    known = SAMPLERS if flag == "--sampler" else PRUNERS
    match = re.fullmatch(r"([\w-]+)\s*(?:\((.*)\))?", text.strip())
    name = match[1].lower() if match is not None else text
    if name not in known:
        near = nearest_name(name, known) or next(iter(known))
        facts = f"Optuna has {', '.join(known)}."
        raise SettingsError(f"There is no {flag.removeprefix('--')} {name}.", facts, str(line.flag(flag, near)))
    assert match is not None
    try:
        options = _options(match[2] or "")
    except ValueError:
        do = str(line.flag(flag, name))
        facts = "Options are NAME=VALUE, separated by commas."
        raise SettingsError(f"Invalid value for {flag}: {text}", facts, do) from None
    allowed = [each for each in inspect.signature(known[name]).parameters if each not in ("seed", "search_space")]
    for option in options:
        if option not in allowed:
            close = nearest_name(option, allowed)
            facts = f"Its options are {', '.join(allowed)}." if allowed else "It has no options."
            do = str(line.flag(flag, text.replace(option, close) if close else name))
            raise SettingsError(f"{name} has no option {option}.", facts, do)
    return name, options


def _options(text: str) -> dict[str, Any]:
    """Parse name=value, name=value. Values are those of TOML. Raises ValueError."""
    found = {}
    for part in filter(None, (part.strip() for part in re.split(r",(?![^\[]*\])", text))):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(part)
        found[name.strip()] = tomllib.loads(f"value = {value.strip()}")["value"]  # TOMLDecodeError is a ValueError
    return found


def build_sampler(text: str, seed: int, space: Mapping[str, Any], line: CommandLine) -> optuna.samplers.BaseSampler:
    """Return a new sampler with this seed.

    Args:
        text: The value of --sampler.
        seed: The seed.
        space: The distributions of the settings, by name.
        line: The typed command, for messages.

    Raises:
        SettingsError: It does not exist, needs another package, or does not accept its options or the space.
    """
    name, options = parse_variant("--sampler", text, line)
    if name == "grid":
        lists = {key: getattr(each, "choices", None) for key, each in space.items()}
        wrong = next((key for key, choices in lists.items() if choices is None), None)
        if wrong is not None:
            facts = f"{wrong} has a range. bruteforce takes ranges of whole numbers, and those with a step."
            raise SettingsError("The sampler grid needs lists.", facts, str(line.flag("--sampler", "bruteforce")))
        options["search_space"] = lists
    elif "seed" in inspect.signature(SAMPLERS[name]).parameters:
        options["warn_independent_sampling"] = False
        options = {key: value for key, value in options.items() if key in inspect.signature(SAMPLERS[name]).parameters}
    sampler: optuna.samplers.BaseSampler = _built(SAMPLERS[name], {**options, "seed": seed}, "--sampler", text, line)
    return sampler


def build_pruner(text: str, line: CommandLine) -> optuna.pruners.BasePruner:
    """Return a new pruner. `text`: the value of --pruner; `line`: the typed command. Raises SettingsError."""
    name, options = parse_variant("--pruner", text, line)
    if name == "patient":
        options.setdefault("wrapped_pruner", None)
    pruner: optuna.pruners.BasePruner = _built(PRUNERS[name], options, "--pruner", text, line)
    return pruner


def _built(kind: type, options: Mapping[str, Any], flag: str, text: str, line: CommandLine) -> Any:
    """Call a class of Optuna. Raises SettingsError if it does not accept the options."""
    name = text.partition("(")[0].strip().lower()
    try:
        for package in PACKAGES.get(name, ()):
            import_module(package)
        return kind(**options)
    except ImportError as error:
        found = re.search(r"pip install (\S+?)[`'.]", str(error))
        needed = found[1] if found else " ".join(PACKAGES.get(name, ()))
        facts = str(error).splitlines()[0]
        do = f"pip install {needed}" if needed else str(line.without(flag))
        raise SettingsError(f"{flag} {name} needs another package.", facts, do) from None
    except (TypeError, ValueError) as error:
        facts = str(error).splitlines()[0] if str(error) else "Optuna gives no reason."
        example = EXAMPLES.get(name, name)
        other = line.flag(flag, example) if example != text else line.without(flag)
        raise SettingsError(f"Optuna does not accept {flag} {text}.", facts, str(other)) from None


def problem_of_space(text: str, infinite: bool, line: CommandLine) -> Problem | None:
    """Return why a sampler cannot use the space. `infinite`: a dimension has numbers without a step."""
    if parse_variant("--sampler", text, line)[0] == "bruteforce" and infinite:
        facts = "Some range has infinitely many numbers: give it a step, as in linear(0,1,0.25), or use a list."
        return Problem("The sampler bruteforce needs a finite space.", facts, str(line.flag("--sampler", "random")))
    return None
