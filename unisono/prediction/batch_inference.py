"""What a script says about its predictions, and the default for scripts that say nothing.

unisono predict RUN DATA OUT --> script --> predict(run, model, DATA) --> Prediction --> parts of OUT
                                            (unisono.main(main, predict=predict))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.utils.data import Dataset

from unisono.data.loader import Collate
from unisono.errors import DataError
from unisono.train.evaluation.model_call import Forward

ScriptPredict = Callable[[Any, torch.nn.Module, Path], Any]
"""The script's function: (settings, model, path) -> Prediction."""


@dataclass(frozen=True)
class Prediction:
    """How to compute predictions for a file or folder.

    Attributes:
        data: A map-style data set, or a list of samples. The output has their order.
        forward: forward(model, batch) -> tensors [samples, ...], or tuples, lists and dicts of them. By default the
            model is called as by `run.predict`.
        collate_fn: Collates a list of samples to a batch, as for DataLoader. None: torch's default_collate.
        describe: describe(row) -> a value that JSON can hold, for one sample. `row` has the structure of the output,
            without its first dim. By default tensors become numbers and lists of them.
    """

    data: Any
    forward: Forward | None = None
    collate_fn: Collate | None = None
    describe: Callable[[Any], Any] | None = None


class TensorRows(Dataset[dict[str, torch.Tensor]]):
    """The rows of tensors with equal first dims, as mappings of names to tensors.

    Args:
        tensors: The tensors [samples, ...].
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, sample: int) -> dict[str, torch.Tensor]:
        return {name: tensor[sample] for name, tensor in self.tensors.items()}


def predict_tensors(model: torch.nn.Module, path: Path) -> Prediction:
    """Return predictions for a safetensors file, whose tensors have the names of the model's arguments.

    Raises:
        DataError: The file cannot be read, or does not fit the model.
    """
    do = "give the script a function: unisono.main(main, predict=predict) (docs/guide/prediction.md)"
    known = list(inspect.signature(model.forward).parameters)
    if path.suffix != ".safetensors":
        fact = "Without a function for other formats, a script predicts for the tensors of a .safetensors file."
        raise DataError(f"The script does not say how to predict for {path}.", fact, do)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"Cannot read {path}.", f"{type(error).__name__}: {error}", do) from error
    sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if (
        not tensors
        or {shape[:1] for shape in sizes.values()} != {next(iter(sizes.values()))[:1]}
        or () in sizes.values()
    ):
        fact = f"Its tensors have the shapes {sizes}. The first dim is the sample."
        raise DataError(f"The tensors of {path} do not have one row for each sample.", fact, do)
    if unknown := sorted(set(tensors) - set(known)):
        fact = f"{type(model).__name__}.forward takes {', '.join(known)}."
        raise DataError(f"The model has no argument {unknown[0]!r}.", fact, f"rename the tensors of {path}, or {do}")
    return Prediction(TensorRows(tensors), forward=lambda model, batch: model(**batch))
