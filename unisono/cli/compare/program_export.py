"""Export the model of a run as a program: run its script to the first step, write, load again elsewhere, compare."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import unisono.export
from unisono.checkpoint.signature import TrustedKey
from unisono.cli.compare.repeated_runs import Verification, reason_of
from unisono.cli.compare.rerun import Rerun
from unisono.errors import CheckpointError, SettingsError
from unisono.export.formats import FORMATS, WEIGHTS, ExportRequest, QualityRequest, bound_of, card_beside, report_beside
from unisono.export.model_card import model_card
from unisono.launcher.supervisor import RunOutcome
from unisono.monitor.stream_text import to_stderr
from unisono.report.result_file import read_result

PLAIN_PROGRAM = (
    *("precision=fp32", "parallel.param_dtype=fp32", "parallel.compile=false", "speed.compile_model=false"),
    *("speed.optimizer=script", "speed.channels_last=false", "speed.attention=any", "speed.float8=none"),
)

"""Settings that change how a model computes, and not its weights. Results depend on them."""

NOT_ENDED = "The run has not ended: this is its newest checkpoint."
"""The first line about an export of such a run."""

LOAD_AGAIN = Path(unisono.export.__file__).with_name("load_again.py")
"""The program of the fresh process. It is not imported here, because it loads torch."""

LOAD_SECONDS = 600.0
"""Time limit for the fresh process."""


@dataclass(kw_only=True)
class ProgramExportRun(Verification):
    """One export.

    Attributes:
        again: How to run the script again.
        shown: The run directory as it was typed.
        request: What to write.
        out: The file or folder to write.
        evaluate: Whether to evaluate the program with the evaluation of the script.
        trust: Public keys, of which one must have signed the checkpoint; (): a signature is not needed.
    """

    again: Rerun
    shown: Path
    request: ExportRequest
    out: Path
    evaluate: bool = True
    trust: Sequence[TrustedKey] = ()

    @property
    def format(self) -> str:
        """The name of the format."""
        return self.request.format

    @property
    def quantize(self) -> str:
        """The name of the quantization; "" for none."""
        return self.request.quantize

    def run(self) -> int:
        """Export the model, and return the exit status."""
        from unisono.checkpoint import load  # here, because it loads torch

        accept = load.only_signed(self.trust)
        checkpoint = load.complete_checkpoint(self.shown, "Cannot export the model of {}.", accept, to_stderr)
        try:
            return self._export(checkpoint)
        finally:
            load.release(checkpoint)

    def _export(self, checkpoint: Path) -> int:
        """Export the model of a checkpoint, and return the exit status."""
        samples = self._write(checkpoint)
        if samples is None:
            return self._leave(1)
        known = json.loads((samples / "facts.json").read_text(encoding="utf-8"))
        evaluates = known.pop("evaluates") and self.evaluate
        program, compared = self._compared(samples)
        if self.quantize:
            _, before = self._compared(samples / "unquantized")
            names = ("bytes", "milliseconds", "megabytes")
            compared |= {f"unquantized_{name}": before[name] for name in names if name in before}
        report = {
            "run": str(self.shown),
            "step": int(checkpoint.name.rpartition("-")[2]),
            "format": self.format,
            **known,
            "weights_sha256": self._fingerprint(checkpoint),
            **compared,
        }
        bound = known.get("bound", bound_of(self.format, self.quantize))
        if not report["relative"] <= bound:
            raise CheckpointError(
                f"The exported {known['class']} computes other values than the model.",
                f"The outputs differ by {report['relative']:.1e}, relative to their norm; {self.format} is allowed "
                f"{bound:.0e}.",
                "--format safetensors for the weights, if the model draws random numbers in eval mode.",
            )
        if evaluates:
            report |= self._quality(checkpoint, program)
        self._publish(program, report)
        return self._leave(0, **report)

    def _write(self, checkpoint: Path) -> Path | None:
        """Let the script of the run write the program and samples, and return their folder; None if it failed."""
        folder = self.folder / "export"
        folder.mkdir()
        tokenizer = str(Path(self.request.tokenizer).absolute()) if self.request.tokenizer else ""
        run_dir = str(self.again.run_dir or self.shown.absolute())
        request = replace(self.request, folder=str(folder), tokenizer=tokenizer, run_dir=run_dir)
        outcome = self._run_script("run", checkpoint, f"export:{request}")
        if not (folder / "facts.json").is_file():
            if outcome.failure is None:
                fact, do = "The script ends before its first step.", "--format safetensors exports the weights"
                raise SettingsError(f"Cannot export the model of {self.shown}.", fact, do)
            self._report_failure(outcome, checkpoint)
            return None
        return folder

    def _report_failure(self, outcome: RunOutcome, checkpoint: Path) -> None:
        """Print the message of this library with which the script ended.

        Raises:
            CheckpointError: It ended with another one.
        """
        message, _ = reason_of(outcome)
        record = outcome.failure.record if outcome.failure is not None else None
        if record is not None and record.problems:
            print(message.replace(str(self.folder / "run" / "checkpoints"), str(checkpoint.parent)), file=sys.stderr)
            return
        kind = f"{record.kind}: " if record is not None and record.traceback else ""
        weights = f"unisono export {shlex.quote(str(self.shown))} model{FORMATS[WEIGHTS].suffix}"
        raise CheckpointError(
            f"Cannot export the model of {self.shown}: its script fails.",
            f"{kind}{(message.strip().splitlines() or ['it has no message'])[0]}",
            f"restore what the script needs, such as its modules and data, or export the weights: {weights}",
        )

    def _run_script(self, name: str, checkpoint: Path, trace: str) -> RunOutcome:
        """Run the script on one process from the checkpoint, with an inspection."""
        return self.again.run(
            self.folder / name,
            ranks=1,
            checkpoint=checkpoint,
            sets=(*PLAIN_PROGRAM, "parallel.cuda_graphs=false", "parallel.activation_checkpoint=none"),
            accept=[each.partition("=")[0] for each in PLAIN_PROGRAM],
            trace=trace,
        )

    def _quality(self, checkpoint: Path, program: Path) -> dict[str, Any]:
        """Let the script evaluate the model and the program. Return what to report."""
        found = self.folder / "quality.json"
        request = QualityRequest(self.format, self.request.model, str(program), str(found))
        outcome = self._run_script("evaluation", checkpoint, f"quality:{request}")
        if found.is_file():
            quality = json.loads(found.read_text(encoding="utf-8"))
        elif outcome.failure is not None:
            quality = {"reason": reason_of(outcome)[0].strip().splitlines()[0]}
        else:
            quality = {"reason": "run.evaluate is not called with this model in the last step, or after the loop"}
        reason = quality.pop("reason", "")
        return {"quality": quality, **({"not_evaluated": reason} if reason else {})}

    def _compared(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        """Return the program in a folder, and its size and what a fresh process says about it."""
        program = folder / f"program{FORMATS[self.format].suffix}"
        found = self._load_again(program, folder)
        if self.format == WEIGHTS:  # a file of weights has no calls
            found = {name: found[name] for name in ("difference", "relative")}
        size = sum(path.stat().st_size for path in (program, *program.rglob("*")) if path.is_file())
        return program, {"bytes": size, **found}

    def _load_again(self, program: Path, samples: Path) -> dict[str, Any]:
        """Load the program in a fresh process without this library, and return how its outputs differ."""
        threads = str(self.again.settings.get("threads", 1))
        command = [sys.executable, "-I", str(LOAD_AGAIN), self.format, str(program), str(samples), threads]
        try:
            done = subprocess.run(command, cwd=samples, capture_output=True, text=True, timeout=LOAD_SECONDS)
        except subprocess.TimeoutExpired:
            raise self._unusable(f"It did not answer within {LOAD_SECONDS:g} s.") from None
        if done.returncode:
            raise self._unusable((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def _unusable(self, fact: str) -> CheckpointError:
        error = f"A fresh process cannot use the exported program. {self.out} was not written."
        return CheckpointError(
            error, fact, "--format hf for a model of transformers, --format safetensors for the weights"
        )

    def _fingerprint(self, checkpoint: Path) -> str:
        from unisono.checkpoint.load import fingerprint  # here, because it loads torch

        return str(fingerprint(checkpoint)["weights_sha256"])

    def _publish(self, program: Path, report: Mapping[str, Any]) -> None:
        """Move the program to its place, with report and model card beside it."""
        card = model_card(self.again.run_dir or self.shown, report)
        text = json.dumps(report, indent=1) + "\n"
        try:
            if program.is_dir():
                draft = draft_of(self.out)
                try:
                    shutil.copytree(program, draft)
                    (draft / "export.json").write_text(text, encoding="utf-8")
                    (draft / "README.md").write_text(card, encoding="utf-8")
                    replace_folder(draft, self.out)
                finally:
                    shutil.rmtree(draft, ignore_errors=True)
            else:
                replace_files({self.out: program, report_beside(self.out): text, card_beside(self.out): card})
        except OSError as error:
            fact = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"Cannot write {self.out}.", fact, "name another path.") from error
        if read_result(self.again.run_dir or self.shown) is None:
            self._say(NOT_ENDED)
        self._say(
            f"{self.out}: {report['class']}, {report['parameters']:,} parameters after step {report['step']}, "
            f"{report['bytes'] / 1e6:.1f} MB"
        )
        for name, size in report.get("inputs", {}).items():
            self._say(f"input {name}: {', '.join(map(str, size))}")
        time = "milliseconds" in report
        shown = f", {report['milliseconds']:.2f} ms for {report['samples']} samples on one thread" if time else ""
        self._say(f"loaded in a fresh process: outputs differ by {report['relative']:.1e} (relative){shown}")
        if self.quantize:
            shown = f", {report['unquantized_milliseconds']:.2f} ms" if time else ""
            self._say(
                f"{self.quantize}: {report['quantized_layers']} linear layers; outputs differ from those of the "
                f"unquantized model by {report['relative_to_unquantized']:.1e} (relative), "
                f"which has {report['unquantized_bytes'] / 1e6:.1f} MB{shown}"
            )
        for name, value in report.get("quality", {}).get("original", {}).items():
            found = report["quality"].get("exported", {}).get(name)
            self._say(f"{name}: {value:.6g}" + (f"; exported: {found:.6g}" if found is not None else ""))
        if "not_evaluated" in report:
            self._say(f"the exported program was not evaluated: {report['not_evaluated']}")
        self._say(f"weights_sha256 {report['weights_sha256']}")

    def _facts(self, status: int) -> dict[str, Any]:
        return {"out": str(self.out)}


def draft_of(out: Path) -> Path:
    """Return the path beside another one at which its new content is written first."""
    return out.with_name(f".{out.name}.{os.getpid()}.unfinished")


def replace_files(contents: Mapping[Path, Path | str]) -> None:
    """Write files, each a copy of a file or a text. None is replaced before all could be written."""
    drafts = {draft_of(path): path for path in contents}
    try:
        for draft, path in drafts.items():
            content = contents[path]
            if isinstance(content, str):
                draft.write_text(content, encoding="utf-8")
            else:
                shutil.copyfile(content, draft)
        for draft, path in drafts.items():
            draft.replace(path)
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)


def replace_folder(new: Path, out: Path) -> None:
    """Move a folder to its place. A folder that is there is deleted only after that."""
    before = out.with_name(f".{out.name}.{os.getpid()}.replaced")
    if out.is_dir():
        out.rename(before)
    try:
        new.rename(out)
    except OSError:
        if before.is_dir():
            before.rename(out)
        raise
    if before.is_dir():
        shutil.rmtree(before)
