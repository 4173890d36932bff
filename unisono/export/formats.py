"""The formats of an export, without torch: what each needs, and how close its outputs must be."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from typing import NamedTuple

from unisono.errors import SettingsError


class ProgramFormat(NamedTuple):
    """A format that holds a program, and not only weights.

    Attributes:
        text: What it is, in a few words.
        suffix: The suffix of its file; "" if it is a folder.
        packages: Modules that must be installed.
        tools: Programs, of which one must be installed.
        bound: The largest norm of a difference of outputs, relative to the norm of the outputs.
        extra: The optional dependencies of this library that have the packages.
    """

    text: str
    suffix: str
    packages: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    bound: float = 1e-5
    extra: str = "export"


BASE = "base"
"""The folder of the model that an adapter changes, beside the adapter, until the adapter was loaded again."""

WEIGHTS = "safetensors"
"""The format that holds weights only."""

FORMATS = {
    "torch": ProgramFormat("a program of torch.export", ".pt2", bound=1e-6),
    "aoti": ProgramFormat(
        "a program that AOTInductor has compiled for this processor", ".pt2", tools=("g++", "clang++")
    ),
    "onnx": ProgramFormat("a model of ONNX", ".onnx", ("onnx", "onnxscript", "onnxruntime")),
    "hf": ProgramFormat(
        "a folder of Hugging Face's transformers", "", ("transformers",), bound=1e-6, extra="huggingface"
    ),
    "peft": ProgramFormat(
        "an adapter of Hugging Face's peft", "", ("transformers", "peft"), bound=1e-6, extra="adapters"
    ),
}
"""Formats of programs by name."""


def suffix_of(name: str) -> str:
    """Return the suffix of the file of a format; "" for a folder."""
    return FORMATS[name].suffix if name in FORMATS else f".{WEIGHTS}"


def require_format(name: str, line: str) -> None:
    """Check that an export in this format can be written here.

    Args:
        name: The name of the format.
        line: The typed command, for the message.

    Raises:
        SettingsError: There is no such format, or something that it needs is not installed.
    """
    if name == WEIGHTS:
        return
    if name not in FORMATS:
        fact = f"The formats are {', '.join((WEIGHTS, *FORMATS))}."
        raise SettingsError(f"There is no format {name}.", fact, f"{line} --format torch")
    known = FORMATS[name]
    missing = [package for package in known.packages if find_spec(package) is None]
    if missing:
        fact = f"{known.text.capitalize()} needs {' and '.join(missing)}."
        raise SettingsError(
            f"--format {name} needs packages that are not installed.", fact, f"pip install 'unisono[{known.extra}]'"
        )
    if known.tools and not any(map(shutil.which, known.tools)):
        fact = f"{known.text.capitalize()} needs {' or '.join(known.tools)}."
        raise SettingsError(f"--format {name} needs a compiler.", fact, "install g++, or: --format torch")
