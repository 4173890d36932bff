"""The loss of a model of transformers for a micro-batch, and the number of items that it is the mean of.

The Trainer divides the loss of a step by the labels of all its micro-batches, if the model lets it
(`num_items_in_batch`); otherwise it averages the means of micro-batches, whatever their sizes. Here the mean of each
micro-batch is multiplied by its number of labels, and the step divides by the total.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.trainer_pt_utils import LabelSmoother

from unisono.errors import LoopError
from unisono.integrations.transformers.collation import base_of, rows_of

IGNORED = -100
"""The label that no loss counts."""


class ModelLoss:
    """The loss that a model computes from a batch with labels.

    Args:
        model: The placed model.
        smoothing: The factor of label smoothing; 0: none.
    """

    def __init__(self, model: torch.nn.Module, smoothing: float = 0.0) -> None:
        base = base_of(model)
        known = getattr(base, "accepts_loss_kwargs", None)
        if known is None:
            parameters = inspect.signature(type(base).forward).parameters.values()
            known = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
        self._takes_count = bool(known) and not smoothing
        self._shifts = LOSS_MAPPING.get(getattr(base, "loss_type", None) or "") is ForCausalLMLoss
        self._shifts &= not getattr(base.config, "is_encoder_decoder", False)
        self._smoother = LabelSmoother(epsilon=smoothing) if smoothing else None

    def forward(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> Any:
        """Call the model on a batch."""
        inputs = dict(batch)
        if self._smoother is not None and "labels" in inputs:
            del inputs["labels"]
        elif self._takes_count and "labels" in inputs:
            count = self.count(batch)
            inputs["num_items_in_batch"] = count.clamp(min=1) if isinstance(count, torch.Tensor) else count
        return model(**inputs)

    def __call__(self, output: Any, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | int]:
        """Return the mean loss of a batch, [], and the number of items that it is the mean of."""
        count = self.count(batch)
        if self._smoother is not None and "labels" in batch:
            least = count.clamp(min=1) if isinstance(count, torch.Tensor) else count
            loss = self._smoother(output, batch["labels"], shift_labels=self._shifts, num_items_in_batch=least)
            return loss, count
        loss = output.get("loss") if isinstance(output, Mapping) else output[0]
        if loss is None:
            raise LoopError(
                "The model returned no loss.",
                f"Its batch has {', '.join(batch)}, and a model of transformers computes a loss from labels.",
                "let the collator add labels: DataCollatorForLanguageModeling(tokenizer, mlm=False), say; or pass "
                "loss=FUNCTION to train.",
            )
        return loss, count

    def measure(self, output: Any, batch: Mapping[str, Any]) -> dict[str, tuple[torch.Tensor, Any]]:
        """Return the sum of the loss over a batch and the number of its items, for `run.evaluate`."""
        loss, count = self(output, batch)
        return {"loss": (loss.detach().double() * count, count)}

    def count(self, batch: Mapping[str, Any]) -> torch.Tensor | int:
        """Return the number of labels that count: tokens, or rows for labels that are real numbers or missing."""
        labels = batch.get("shift_labels", batch.get("labels"))
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
            return rows_of(batch)
        if self._shifts and "shift_labels" not in batch:
            labels = labels[..., 1:]
        return labels.ne(IGNORED).sum()
