"""Collators of transformers under the loader: the same batches in every placement.

The loader seeds torch's, numpy's and Python's generators before each micro-batch. A collator that draws from them
(random masks) therefore draws the same numbers wherever the micro-batch is computed. One with a generator of its own
would continue its stream from micro-batch to micro-batch, so its masks would depend on the placement. It is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DataCollatorWithPadding, default_data_collator

from unisono.errors import DataError

LABELS = ("label", "label_ids", "labels")
"""Columns that collators rename to `labels`."""

Collator = Callable[[list[Any]], Any]


def base_of(model: torch.nn.Module) -> Any:
    """Return the model of transformers that a PeftModel adapts; any other model as it is."""
    base = getattr(model, "get_base_model", None)
    return model if base is None else base()


def accepted_names(model: torch.nn.Module) -> set[str]:
    """Return the names of the columns that a model uses: the arguments of its forward, and labels."""
    names = set(inspect.signature(type(base_of(model)).forward).parameters)
    return (names | set(LABELS)) - {"self", "kwargs"}


@dataclass(frozen=True)
class ColumnCollator:
    """A collator that gets only the columns that the model uses.

    Attributes:
        collator: A list of dicts -> a batch.
        columns: Names of columns; None: all.
    """

    collator: Collator
    columns: frozenset[str] | None

    def __call__(self, samples: list[Any]) -> Any:
        if self.columns is not None and isinstance(samples[0], Mapping):
            samples = [{name: value for name, value in each.items() if name in self.columns} for each in samples]
            if not samples[0]:
                raise DataError(
                    "No column of the data is an argument of the model.",
                    f"The model uses {', '.join(sorted(self.columns))}.",
                    "rename the columns, or remove_unused_columns=False with a collator that makes the arguments.",
                )
        batch = self.collator(samples)
        return dict(batch) if isinstance(batch, Mapping) else batch


def trainer_collator(
    model: torch.nn.Module, collator: Collator | None = None, processing_class: Any = None, *, keep: bool = False
) -> ColumnCollator:
    """Return the collator that the Trainer would use, for `run.steps` and `run.evaluate`.

    Args:
        model: The model, whose forward names the columns.
        collator: A collator; None: DataCollatorWithPadding, or default_data_collator without a tokenizer.
        processing_class: The tokenizer.
        keep: Pass all columns to the collator.

    Raises:
        DataError: The collator has a random number generator of its own.
    """
    if collator is None:
        pads = processing_class is not None and hasattr(processing_class, "pad")
        collator = DataCollatorWithPadding(processing_class) if pads else default_data_collator
    refuse_own_generator(collator)
    return ColumnCollator(collator, None if keep else frozenset(accepted_names(model)))


def refuse_own_generator(collator: Any) -> None:
    """Raise DataError for a collator whose random numbers would depend on the placement."""
    seed = getattr(collator, "seed", None)
    if isinstance(seed, int):
        raise DataError(
            f"The {type(collator).__name__} has a random number generator of its own.",
            f"With seed={seed} it continues one stream of numbers from micro-batch to micro-batch, so that its masks "
            "would depend on which process computes which.",
            "leave seed out: the run seeds the generators for each micro-batch, from its own seed.",
        )


def rows_of(batch: Mapping[str, Any]) -> int:
    """Return the number of rows of a batch."""
    return next(len(value) for value in batch.values() if isinstance(value, (torch.Tensor, Sequence)))
