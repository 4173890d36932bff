"""Predict for a file or folder with the model of an earlier run: the script runs to its first step, which is not taken.

    checkpoint --> script, on all processes --> before the first step --> part 0, part 1, ... of the data

A part is a range of samples, and the micro-batches in it do not depend on the number of processes. The main process
writes each part when it is complete, and parts that exist are not computed again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

from unisono.errors import DataError, LoopError, RunStopped
from unisono.prediction.batch_inference import Prediction, ScriptPredict, predict_tensors
from unisono.prediction.part_files import PartFiles
from unisono.train.context import Inspection, LoopParts, RunContext
from unisono.train.evaluation.collective_pass import collective_pass
from unisono.train.evaluation.predict import predict
from unisono.train.extensions import Extension
from unisono.train.step_state import StepState

PART_SAMPLES = 1024
"""Samples of a part."""

COMPLETE = "complete.json"
"""The file in the folder of the parts that says how many there are."""


@dataclass(frozen=True)
class PredictionRequest:
    """What to predict.

    Attributes:
        data: The absolute path of the file or folder.
        out: The absolute path of the output.
        model: The name under which the run tracks the model; "" if it tracks one.
    """

    data: str
    out: str
    model: str

    @classmethod
    def of(cls, text: str) -> PredictionRequest:
        """Parse the text form, a JSON object."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        return json.dumps(asdict(self))


class PredictedParts(Extension):
    """Compute all parts before the first step, and end the run.

    Args:
        request: What to predict.
        script: The script's function; None: the data are tensors for the model.
        context: The context of the run.
        parts: The parts of its loop.
    """

    def __init__(
        self, request: PredictionRequest, script: ScriptPredict | None, context: RunContext, parts: LoopParts
    ) -> None:
        self._request, self._script, self._context = request, script, context
        progress = context.progress
        progress.steps_done = max(min(progress.steps_done, progress.last - 1), 0)  # a run that has ended, too

    def before_step(self, step: StepState) -> None:
        request, context = self._request, self._context
        model, path = context.state.model_named(request.model), Path(request.data)
        prediction = (
            predict_tensors(model, path) if self._script is None else self._script(context.settings, model, path)
        )
        if not isinstance(prediction, Prediction):
            raise LoopError(
                "The script's predict function returned no unisono.Prediction.",
                f"It returned a {type(prediction).__name__}.",
                "return unisono.Prediction(data, forward=...)",
            )
        data = prediction.data
        total = len(data) if hasattr(data, "__len__") else 0
        if not total:
            raise DataError(
                f"There is nothing to predict in {path}.", "The data set has no samples.", "name other data."
            )
        files = PartFiles.of(Path(request.out))
        ranges = [range(first, min(first + PART_SAMPLES, total)) for first in range(0, total, PART_SAMPLES)]
        begin = context.group.broadcast_object(files.count())
        for number in range(begin, len(ranges)):
            subset: Subset[Any] = Subset(data, ranges[number])
            with collective_pass(
                context, "unisono predict", model, subset, prediction.forward, prediction.collate_fn
            ) as outputs:
                output = predict(outputs)
            if context.group.rank == 0:
                files.write(number, output, prediction.describe)
            leaving = torch.tensor([context.progress.leaving], dtype=torch.uint8, device=context.group.device)
            if context.group.max_(leaving).item():  # Ctrl-C, or SIGTERM
                raise RunStopped
        if context.group.rank == 0:
            facts = {"parts": len(ranges), "samples": total, "computed": len(ranges) - begin}
            (files.folder / COMPLETE).write_text(json.dumps(facts), encoding="utf-8")
        context.group.barrier()
        raise RunStopped


def predict_run(request: str, rank: int, script: ScriptPredict | None) -> Inspection:
    """Return an inspection that predicts. `request`: a PredictionRequest as text; `rank`: of this process."""
    return Inspection(partial(PredictedParts, PredictionRequest.of(request), script))
