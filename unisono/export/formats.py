"""The formats of an export, without torch: what each needs, and how close its outputs must be."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from unisono.errors import SettingsError


class ProgramFormat(NamedTuple):
    """A format that holds a program, and not only weights.

    Attributes:
        text: What it is, in a few words.
        suffix: The suffix of its file; "" if it is a folder.
        packages: Modules that must be installed.
        tools: Programs, of which one must be installed.
        bound: The largest norm of a difference of outputs, relative to the norm of the outputs.
        install: What pip installs to have the packages.
    """

    text: str
    suffix: str
    packages: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    bound: float = 1e-5
    install: str = "unisono[export]"


@dataclass(frozen=True)
class ExportRequest:
    """What to write.

    Attributes:
        format: The name of the format.
        model: The name under which the run tracks the model; "" if it tracks one.
        folder: The folder for the program, the samples and the facts; "" before it is known.
        quantize: The name of the quantization; "" for none.
        shard_size: The largest file of weights of the format hf, such as "5GB".
        tokenizer: A folder with a tokenizer for the formats hf and gguf; "" if none was named.
        run_dir: The run directory, which may hold a tokenizer.
    """

    format: str
    model: str = ""
    folder: str = ""
    quantize: str = ""
    shard_size: str = "5GB"
    tokenizer: str = ""
    run_dir: str = ""

    @classmethod
    def of(cls, text: str) -> ExportRequest:
        """Parse the text form, a JSON object."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class QualityRequest:
    """What to evaluate (script_evaluation.py).

    Attributes:
        format: The name of the format.
        model: The name under which the run tracks the model; "" if it tracks one.
        program: The exported program.
        out: The file for the result, a JSON object: {"original": ..., "exported": ...}, or {"reason": ...}.
    """

    format: str
    model: str
    program: str
    out: str

    @classmethod
    def of(cls, text: str) -> QualityRequest:
        """Parse the text form, a JSON object."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        return json.dumps(asdict(self))


BASE = "base"
"""The folder of the model that an adapter changes, beside the adapter, until the adapter was loaded again."""

WEIGHTS = "safetensors"
"""The format that holds weights only."""

ADAPTER = "peft"
"""The format that holds an adapter alone."""

FORMATS = {
    WEIGHTS: ProgramFormat("a file of weights", ".safetensors"),
    "torch": ProgramFormat("a program of torch.export", ".pt2", bound=1e-6),
    "aoti": ProgramFormat(
        "a program that AOTInductor has compiled for this processor", ".pt2", tools=("g++", "clang++")
    ),
    "onnx": ProgramFormat("a model of ONNX", ".onnx", ("onnx", "onnxscript", "onnxruntime")),
    "executorch": ProgramFormat(
        "a program for the runtime of ExecuTorch", ".pte", ("executorch",), install="unisono[executorch]"
    ),
    "hf": ProgramFormat(
        "a folder of Hugging Face's transformers", "", ("transformers",), bound=1e-6, install="unisono[huggingface]"
    ),
    ADAPTER: ProgramFormat(
        "an adapter of Hugging Face's peft", "", ("transformers", "peft"), bound=1e-6, install="unisono[adapters]"
    ),
    "gguf": ProgramFormat(
        "a file of llama.cpp",
        ".gguf",
        ("transformers", "gguf"),
        bound=1e-6,
        install="unisono[gguf]",
    ),
}
"""Formats by name."""

PROGRAMS = ("torch", "aoti", "onnx", "executorch")
"""Formats that hold what torch.export has captured."""

WITH_TOKENIZER = ("hf", "gguf")
"""Formats that may hold a tokenizer."""

KINDS = {
    "int8": "int8 weights, a scale for each output",
    "int8-dynamic": "int8 weights, and activations that are rounded to int8 in each call, a scale for each row",
    "int4": "int4 weights in groups of 32, a scale for each group; one byte for each weight",
}
"""Quantizations by name."""

DYNAMIC = "int8-dynamic"
"""The quantization of activations."""

NOT_QUANTIZED = {
    "onnx": "onnxruntime quantizes models of ONNX itself: onnxruntime.quantization.quantize_dynamic.",
    "executorch": "The back ends of ExecuTorch have quantizers of their own, such as XNNPACKQuantizer.",
    "hf": "from_pretrained needs a configuration of the quantization: AutoModel.from_pretrained(FOLDER, "
    "quantization_config=TorchAoConfig(...)) quantizes the exported folder.",
    "peft": "An adapter is small, and peft loads it with the precision in which it was trained.",
}
"""Why a format cannot hold a quantized model."""


def require_flags(name: str, flags: Mapping[str, Any], line: str) -> None:
    """Check that the flags for a model of transformers fit the format.

    Args:
        name: The name of the format.
        flags: "--shard-size" and "--tokenizer", with their values; None if the flag was not given.
        line: The typed command without these flags, for the message.

    Raises:
        SettingsError: The format has no use for a flag, or its value is wrong.
    """
    size, tokenizer = flags["--shard-size"], flags["--tokenizer"]
    if size is not None and name != "hf":
        error = f"--format {name} cannot be combined with --shard-size."
        raise SettingsError(
            error, "Only a folder of transformers has shards.", f"{line} --format hf --shard-size {size}"
        )
    if size is not None and not re.fullmatch(r"[1-9]\d*[KMGT]B", size):
        fact = "It is a whole number with a unit: KB, MB, GB or TB."
        raise SettingsError(f"--shard-size {size} is no size.", fact, f"{line} --format hf --shard-size 5GB")
    if tokenizer is not None and name not in WITH_TOKENIZER:
        error = f"--format {name} cannot be combined with --tokenizer."
        fact = f"Formats with a tokenizer are {' and '.join(WITH_TOKENIZER)}."
        raise SettingsError(error, fact, f"{line} --format hf --tokenizer {tokenizer}")
    if tokenizer is not None and not Path(tokenizer).is_dir():
        do = 'tokenizer.save_pretrained("FOLDER"), and then --tokenizer FOLDER'
        raise SettingsError(f"There is no folder {tokenizer}.", "--tokenizer names a folder with a tokenizer.", do)


def suffix_of(name: str) -> str:
    """Return the suffix of the file of a format; "" for a folder."""
    return FORMATS[name].suffix


def report_beside(out: Path) -> Path:
    """Return the file for the report of an export that is a file. An export that is a folder contains its report."""
    return out.with_name(f"{out.name}.export.json")


def card_beside(out: Path) -> Path:
    """Return the file for the model card of an export that is a file."""
    return out.with_name(f"{out.name}.md")


def bound_of(name: str, quantize: str) -> float:
    """Return the largest relative difference of outputs that an export may have.

    A program may add in another order than the model. An activation at the edge between two of 255 integers is then
    rounded to the other one, and moves by a whole integer.
    """
    return 1e-2 if quantize == DYNAMIC else FORMATS[name].bound


def require_format(name: str, line: str) -> None:
    """Check that an export in this format can be written here.

    Args:
        name: The name of the format.
        line: The typed command, for the message.

    Raises:
        SettingsError: There is no such format, or something that it needs is not installed.
    """
    if name not in FORMATS:
        fact = f"The formats are {', '.join(FORMATS)}."
        raise SettingsError(f"There is no format {name}.", fact, f"{line} --format torch")
    known = FORMATS[name]
    missing = [package for package in known.packages if find_spec(package) is None]
    if missing:
        fact = f"{known.text[0].upper()}{known.text[1:]} needs {' and '.join(missing)}."
        raise SettingsError(
            f"--format {name} needs packages that are not installed.", fact, f"pip install '{known.install}'"
        )
    if known.tools and not any(map(shutil.which, known.tools)):
        fact = f"{known.text[0].upper()}{known.text[1:]} needs {' or '.join(known.tools)}."
        raise SettingsError(f"--format {name} needs a compiler.", fact, "install g++, or: --format torch")


def require_quantization(kind: str, name: str, line: str) -> None:
    """Check that a quantized export in this format can be written here.

    Args:
        kind: The name of the quantization.
        name: The name of the format.
        line: The typed command without the format, for the message.

    Raises:
        SettingsError: There is no such quantization, the format cannot hold it, or torchao is not installed.
    """
    if kind not in KINDS:
        fact = f"The quantizations are {', '.join(KINDS)}."
        raise SettingsError(f"There is no quantization {kind}.", fact, f"{line} --format {name} --quantize int8")
    if name in NOT_QUANTIZED:
        error = f"--format {name} cannot be combined with --quantize."
        raise SettingsError(error, NOT_QUANTIZED[name], f"{line} --format torch --quantize {kind}")
    if (name, kind) == (WEIGHTS, DYNAMIC):
        error = f"--quantize {kind} needs a format that holds a program."
        fact = "A file of weights cannot state that activations are rounded; its weights would be those of int8."
        do = f"{line} --format torch --quantize {kind}, or: {line} --quantize int8"
        raise SettingsError(error, fact, do)
    if name == "gguf":
        if kind != "int8":
            fact = "The format gguf has one quantization here, Q8_0 for int8: blocks of 32 integers that share a scale."
            raise SettingsError(
                f"--format gguf cannot be combined with --quantize {kind}.",
                fact,
                f"{line} --format gguf --quantize int8",
            )
    elif find_spec("torchao") is None:
        fact = "Linear layers are quantized by torchao."
        raise SettingsError(
            "--quantize needs a package that is not installed.", fact, "pip install 'unisono[quantize]'"
        )
