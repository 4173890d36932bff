"""unisono export: write a run's weights, or its model as a program, for other programs."""

from __future__ import annotations

import json as json_
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from unisono.checkpoint.signature import private_key, sign_export, trusted_keys
from unisono.cli.commands.fingerprint import no_checkpoint, with_checkpoints
from unisono.cli.compare.program_export import NOT_ENDED, ProgramExportRun
from unisono.cli.compare.rerun import earlier, is_run
from unisono.config import CommandLine, plural
from unisono.errors import SettingsError
from unisono.export.formats import (
    WEIGHTS,
    ExportRequest,
    card_beside,
    report_beside,
    require_flags,
    require_format,
    require_quantization,
    suffix_of,
)
from unisono.monitor.stream_text import to_stderr
from unisono.report.result_file import read_result

ShardSize = Annotated[
    str | None,
    Parameter(metavar="SIZE", help="For hf: the largest file of weights, 5GB by default. Several files get an index."),
]
Tokenizer = Annotated[
    Path | None,
    Parameter(
        metavar="FOLDER",
        help="For hf and gguf: a folder with the tokenizer. By default RUN/tokenizer, or the folder of the model.",
    ),
]
NoEvaluate = Annotated[
    bool,
    Parameter(
        negative=(),
        show_default=False,
        help="Leave out the evaluation of the script, which is otherwise computed with the model and the program.",
    ),
]
Sign = Annotated[
    Path | None, Parameter(metavar="KEY", help="Sign the file with this private key, in OUT.signature.json.")
]
Trust = Annotated[
    tuple[Path, ...],
    Parameter(
        metavar="KEY",
        negative=(),
        consume_multiple=False,
        show_default=False,
        help="Export only a checkpoint that this public key, or another one of several, has signed.",
    ),
]


def export(
    folder: Path,
    out: Path,
    /,
    *,
    kind: Annotated[str, Parameter(name="--format", metavar="NAME")] = WEIGHTS,
    model: Annotated[str | None, Parameter(metavar="NAME")] = None,
    quantize: Annotated[str | None, Parameter(metavar="KIND")] = None,
    shard_size: ShardSize = None,
    tokenizer: Tokenizer = None,
    no_evaluate: NoEvaluate = False,
    sign: Sign = None,
    trust: Trust = (),
    script: Annotated[Path | None, Parameter(metavar="FILE", show_default=False)] = None,
    force: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
) -> int:
    """Write the weights of a run, or its model as a program that needs neither Unisono nor the script.

    By default the weights go to one safetensors file, under the model's own names. Tied weights are written once;
    safetensors.torch.load_model(model, OUT) restores them.

    For a program, the script of the run is executed to its first step, whose inputs are the example. The program is
    loaded again in a fresh process, and compared with the model. A report and a model card are written beside it.

    Parameters
    ----------
    folder
        A run directory, for its newest complete checkpoint, or a checkpoint.
    out
        The file to write; a folder for the formats hf and peft.
    kind
        safetensors: weights. torch: a program of torch.export. aoti: compiled by AOTInductor for this processor. onnx.
        executorch: for its runtime. hf: a folder that from_pretrained of transformers loads; adapters of peft are
        merged. peft: the adapter alone. gguf: for llama.cpp.
    model
        Write only this model. By default the weights of all tracked models are written, with the model's name as a
        prefix.
    quantize
        Quantize the linear layers. int8 or int4: their weights. int8-dynamic: weights and activations. For the formats
        torch, aoti and safetensors; int8-dynamic not for safetensors. For gguf: int8, which is Q8_0.
    script
        The script of the run, if it was moved.
    force
        Overwrite an existing file.
    json
        Print a summary as JSON.
    """

    def line(folder: Path, out: Path, *flags: str) -> str:
        words = ["unisono", "export", str(folder), str(out), *(["--model", model] if model is not None else [])]
        words += ["--format", kind] if kind != WEIGHTS else []
        words += ["--quantize", quantize] if quantize is not None else []
        words += ["--shard-size", shard_size] if shard_size is not None else []
        words += ["--tokenizer", str(tokenizer)] if tokenizer is not None else []
        return shlex.join([*words, *flags])

    if quantize is not None:
        require_quantization(quantize, kind, shlex.join(["unisono", "export", str(folder), str(out)]))
    _check_paths(folder, out, kind, line, quantized=quantize is not None, force=force)
    flags = {"--shard-size": shard_size, "--tokenizer": tokenizer}
    require_flags(kind, flags, shlex.join(["unisono", "export", str(folder), str(out)]))
    if kind != WEIGHTS or quantize is not None:
        request = ExportRequest(kind, model or "", "", quantize or "", shard_size or "5GB", str(tokenizer or ""))
        return _export_program(
            folder, out, request, script, line, evaluate=not no_evaluate, sign=sign, trust=trust, as_json=json
        )
    return _export_weights(folder, out, model, sign, trust, as_json=json)


def _check_paths(folder: Path, out: Path, kind: str, line: Callable[..., str], *, quantized: bool, force: bool) -> None:
    """Raise SettingsError if there is nothing to export, or if it cannot be written."""
    if error := no_checkpoint(folder):
        facts = "The first argument is a run directory, or a checkpoint."
        raise SettingsError(error, facts, line(Path(with_checkpoints(folder)), out))
    require_format(kind, shlex.join(["unisono", "export", str(folder), str(out)]))
    written = _written(out, kind, quantized=quantized)
    if suffix_of(kind) and (folders := [each for each in written if each.is_dir()]):
        raise SettingsError(
            f"{folders[0]} is a folder.",
            "An export is one file.",
            line(folder, (out if out.is_dir() else out.parent) / f"model{suffix_of(kind)}"),
        )
    if not out.parent.is_dir():
        do = f"mkdir -p {out.parent} && {line(folder, out, *['--force'] * force)}"
        raise SettingsError(f"Cannot write {out}.", f"There is no folder {out.parent}.", do)
    if out.is_dir() and any(out.iterdir()) and not (out / "export.json").is_file():
        other = out.with_name(f"{out.resolve().name}-2")
        fact = "It has files, and no export.json. Only an earlier export is replaced."
        raise SettingsError(f"{out} is no export.", fact, line(folder, other))
    if not force and (there := [each for each in written if each.exists()]):
        other = out.with_name(f"{out.stem}-2{out.suffix}")
        do = f"{line(folder, out, '--force')}, or: {line(folder, other)}"
        raise SettingsError(f"{there[0]} exists.", "An existing file is overwritten only with --force.", do)


def _written(out: Path, kind: str, *, quantized: bool) -> list[Path]:
    """Return what an export writes: the program, and beside a file its report and its model card."""
    if (kind == WEIGHTS and not quantized) or not suffix_of(kind):
        return [out]
    return [out, report_beside(out), card_beside(out)]


def _export_weights(
    folder: Path, out: Path, model: str | None, sign: Path | None, trust: Sequence[Path], *, as_json: bool
) -> int:
    """Export weights to a safetensors file, and return the exit status."""
    from unisono.checkpoint.load import only_signed
    from unisono.export.safetensors_file import export as write  # here, because it loads torch

    key = private_key(sign) if sign is not None else None
    done = write(folder, out, model, accept=only_signed(trusted_keys(trust)), note=to_stderr)
    signature = sign_export(out, key) if key is not None else None
    if as_json:
        summary = {name: str(v) if isinstance(v, Path) else v for name, v in done._asdict().items()}
        summary["signature"] = None if signature is None else str(signature)
        print(json_.dumps(summary))
        return 0
    if is_run(folder) and read_result(folder) is None:
        print(NOT_ENDED)
    print(f"{done.path}: {plural(done.tensors, 'tensor')} after step {done.step}, {done.bytes / 1e6:.1f} MB")
    for name, first in done.aliases.items():
        print(f"{name} is tied to {first}, and is written once")
    if done.left_out:
        print(f"Left out, because they are not tensors: {', '.join(done.left_out)}")
    if signature is not None:
        print(f"{signature}: the signature")
    print(f"weights_sha256 {done.weights_sha256}")
    return 0


def _export_program(
    folder: Path,
    out: Path,
    request: ExportRequest,
    script: Path | None,
    line: Callable[..., str],
    *,
    evaluate: bool,
    sign: Path | None,
    trust: Sequence[Path],
    as_json: bool,
) -> int:
    """Export the model of a run directory as a program, and return the exit status."""
    kind = request.format
    if sign is not None and not suffix_of(kind):
        fact = "A signature covers one file, and this format is a folder."
        raise SettingsError(f"--sign cannot be combined with --format {kind}.", fact, line(folder, out))
    key = private_key(sign) if sign is not None else None
    typed = CommandLine(tuple(shlex.split(line(folder, out))))
    again = earlier(folder, script, typed)
    with tempfile.TemporaryDirectory(prefix="unisono-export-") as scratch:
        status = ProgramExportRun(
            again=again,
            shown=folder,
            request=request,
            out=out,
            evaluate=evaluate,
            trust=trusted_keys(trust),
            folder=Path(scratch),
            line=typed,
            as_json=as_json,
        ).run()
    if key is not None and status == 0:
        print(f"{sign_export(out, key)}: the signature", file=sys.stderr if as_json else sys.stdout)
    return status
