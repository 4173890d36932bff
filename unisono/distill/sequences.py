"""Sequence-level distillation: the student trains on sequences that the teacher has generated.

(Kim and Rush 2016, arXiv 1606.07947)

    prompts = TensorDataset(tokens[:, :8])
    written = run.predict(teacher, prompts, forward=lambda m, batch: distill.continue_sequences(m, batch[0], 120))
    for step in run.steps(TensorDataset(written[:, :-1], written[:, 1:])): ...
"""

from __future__ import annotations

import torch
from torch import Tensor


def continue_sequences(
    model: torch.nn.Module, tokens: Tensor, length: int, *, temperature: float = 0.0, context: int | None = None
) -> Tensor:
    """Return sequences with `length` more tokens each: int64 [batch, prompt + length].

    As `forward` of `run.predict` it gives the same tokens on any number of processes: random numbers are keyed by the
    micro-batch.

    Args:
        model: maps tokens [batch, length] to logits [batch, length, tokens].
        tokens: the prompts, int64 [batch, prompt].
        length: how many tokens to add.
        temperature: 0: take the most likely token; otherwise sample from softmax(logits / temperature).
        context: the largest number of tokens that the model is given: the last ones.
    """
    for _ in range(length):
        logits = model(tokens if context is None else tokens[:, -context:])[:, -1].float()
        if temperature == 0:
            new = logits.argmax(-1, keepdim=True)
        else:
            new = torch.multinomial((logits / temperature).softmax(-1), 1)
        tokens = torch.cat((tokens, new), dim=1)
    return tokens
