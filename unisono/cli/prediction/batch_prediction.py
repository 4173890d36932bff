"""One execution of `unisono predict`: run the script of a run to its first step, then join the parts that it wrote."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.checkpoint.signature import sha256_of
from unisono.cli.compare.repeated_runs import Verification, reason_of
from unisono.cli.compare.rerun import Rerun
from unisono.config import plural
from unisono.errors import CheckpointError, SettingsError


@dataclass(kw_only=True)
class BatchPrediction(Verification):
    """One prediction.

    Attributes:
        again: How to run the script again.
        shown: The run directory as it was typed.
        data: The file or folder to predict for.
        out: The file to write.
        model: The name of the model; "" for the only one.
        ranks: The number of processes.
        force: Discard the parts of another prediction.
    """

    again: Rerun
    shown: Path
    data: Path
    out: Path
    model: str
    ranks: int
    force: bool

    def run(self) -> int:
        """Predict, and return the exit status."""
        from unisono.checkpoint.load import fingerprint  # here, because these load torch
        from unisono.prediction.part_files import PartFiles
        from unisono.prediction.predicted_parts import COMPLETE

        step, checkpoint = self.again.checkpoint()
        if checkpoint is None:
            fact, do = "It has no intact checkpoint.", f"unisono fingerprint {self.shown}, which says what is damaged"
            raise CheckpointError(f"Cannot predict with the model of {self.shown}.", fact, do)
        weights = str(fingerprint(checkpoint)["weights_sha256"])
        parts = PartFiles.of(self.out)
        wanted = {"weights_sha256": weights, "model": self.model, "data": digest_of(self.data)}
        self._begin(parts, wanted | {"script": sha256_of(self.again.script)})
        request = {"data": str(self.data), "out": str(self.out), "model": self.model}
        outcome = self.again.run(
            self.folder / "run",
            ranks=self.ranks,
            checkpoint=checkpoint,
            sets=("parallel.cuda_graphs=false", f"virtual_ranks={self.again.settings['virtual_ranks']}"),
            trace=f"predict:{json.dumps(request)}",
        )
        complete = parts.folder / COMPLETE
        if not complete.is_file():
            if outcome.failure is None and not outcome.stopped:
                fact, do = "The script ends before its first step.", "call run.steps() in the script"
                raise SettingsError(f"Cannot predict with the model of {self.shown}.", fact, do)
            if outcome.failure is not None:
                print(reason_of(outcome)[0], file=sys.stderr)
            if kept := parts.count():
                text = f"{plural(kept, 'part')} of the output {'is' if kept == 1 else 'are'} kept in {parts.folder}."
                print(f"{text}\n  Next: {self.line}, which continues", file=sys.stderr)
            else:
                shutil.rmtree(parts.folder)
            return self._leave(1)
        facts = json.loads(complete.read_text(encoding="utf-8"))
        parts.join(self.out, {"weights_sha256": weights})
        self._say(
            f"{self.out}: {plural(facts['samples'], 'sample')}, with the model after step {step}, on "
            f"{plural(self.ranks, 'process', 'processes')}"
        )
        if earlier := facts["parts"] - facts["computed"]:
            self._say(f"{plural(earlier, 'part')} had been computed before")
        self._say(f"weights_sha256 {weights}")
        return self._leave(0, step=step, weights_sha256=weights, **facts)

    def _begin(self, parts: Any, request: dict[str, Any]) -> None:
        """Prepare the folder of the parts. Raise SettingsError if it belongs to another prediction."""
        if not parts.begin(request):
            if not self.force:
                fact = f"{parts.folder} was written with other data, weights or another script."
                raise SettingsError(f"{self.out} was begun by another prediction.", fact, f"{self.line} --force")
            shutil.rmtree(parts.folder)
            parts.begin(request)

    def _facts(self, status: int) -> dict[str, Any]:
        return {"out": str(self.out)}


def digest_of(data: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of all files of a folder."""
    if data.is_file():
        return sha256_of(data)
    whole = hashlib.sha256()
    for path in sorted(path for path in data.rglob("*") if path.is_file()):
        whole.update(f"{path.relative_to(data)}\0{sha256_of(path)}\n".encode())
    return whole.hexdigest()
