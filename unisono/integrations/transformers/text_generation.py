"""Generate texts for a data set on all processes, in the order of the data, with the same tokens in every placement.

Each process continues its micro-batches. Random numbers of sampling are keyed by micro-batch. Where every process holds
a part of each layer (parallel.shard), all must call the model equally often. Then each micro-batch is continued to its
full length, and tokens after the first end of text are removed: so the tokens are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from unisono.data.loader import Collate
from unisono.errors import LoopError
from unisono.integrations.transformers.collation import base_of
from unisono.integrations.transformers.padded_predictions import predict_padded
from unisono.train.run import Run

NOT_FOR_GENERATION = ("labels", "decoder_input_ids", "decoder_attention_mask")
"""Parts of a batch that a generation does not get."""


def generate_tokens(
    run: Run[Any], model: torch.nn.Module, data: Any, *, collate_fn: Collate | None = None, **options: Any
) -> torch.Tensor:
    """Return the generated tokens for every sample, in the data's order, on every process.

    Args:
        run: The run.
        model: A placed model of transformers, or one with an adapter.
        data: The data set. Prompts of a model without an encoder are padded on the left.
        collate_fn: A list of samples -> a batch with input_ids and attention_mask. Its labels are not used.
        options: Options of `generate`: max_new_tokens, num_beams, do_sample, generation_config, ...

    Returns:
        Tokens [samples, length] without their prompts, padded at the end.

    Raises:
        LoopError: The placement cannot generate.
    """
    base = base_of(model)
    parallel = run.settings.parallel
    configs = (options.get("generation_config"), base.generation_config)
    beams = options.get("num_beams") or next((n for each in configs if (n := getattr(each, "num_beams", None))), 1)
    if run.context.mesh.pipeline.size > 1 or run.context.mesh.context.size > 1:
        raise LoopError(
            f"Cannot generate with a {type(base).__name__} that is divided into stages, or sequences into slices.",
            f"parallel.pipeline={parallel.pipeline}, parallel.context={parallel.context}.",
            "leave out predict_with_generate, or use parallel.shard or parallel.tensor.",
        )
    lockstep = run.context.models.needs_lockstep
    if lockstep and beams > 1:
        raise LoopError(
            f"Cannot generate with {beams} beams and parallel.shard={parallel.shard}.",
            "A search with beams ends when its texts end, so processes would call the model unequally often.",
            "num_beams=1, or --set parallel.shard=1",
        )
    if lockstep and base.config.is_encoder_decoder and parallel.reshard == "layer":
        raise LoopError(
            f"Cannot generate with a {type(base).__name__} and parallel.shard={parallel.shard}.",
            "generate calls its encoder alone, so the parameters outside of its layers are not gathered.",
            "--set parallel.reshard=step",
        )
    if lockstep and not base.config.is_encoder_decoder and not _new_tokens(options, configs):
        raise LoopError(
            f"Cannot generate up to a maximum length with parallel.shard={parallel.shard}.",
            "Prompts of unequal lengths would need unequally many calls of the model, which all processes compute "
            "together.",
            "max_new_tokens=N, in place of max_length or generation_max_length.",
        )
    config = base.generation_config
    ends = options.pop("eos_token_id", None) or config.eos_token_id
    ends = [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [int(ends)]
    padding = next((n for n in (options.get("pad_token_id"), config.pad_token_id, *ends) if n is not None), 0)
    options = {**options, "pad_token_id": padding, "eos_token_id": None if lockstep or not ends else ends}
    forward = partial(_generate, base=base, ends=ends, padding=padding, options=options)
    tokens: torch.Tensor = predict_padded(run, model, data, forward=forward, collate_fn=collate_fn, padding=padding)
    return tokens


def _new_tokens(options: Mapping[str, Any], configs: tuple[Any, ...]) -> int:
    """Return the number of tokens to generate; 0 if the options state a total length, or none."""
    own = options.get("max_new_tokens")
    if own is None and options.get("max_length") is None:
        own = next((n for each in configs if (n := getattr(each, "max_new_tokens", None))), None)
    return int(own or 0)


def generate_texts(
    run: Run[Any],
    model: torch.nn.Module,
    data: Any,
    tokenizer: Any,
    *,
    collate_fn: Collate | None = None,
    **options: Any,
) -> list[str]:
    """Return the generated text for every sample, in the data's order, on every process.

    Args:
        run: The run.
        model: A placed model of transformers.
        data: The data set.
        tokenizer: Decodes tokens.
        collate_fn: As for `generate_tokens`.
        options: Options of `generate`.
    """
    tokens = generate_tokens(run, model, data, collate_fn=collate_fn, **options)
    return list(tokenizer.batch_decode(tokens, skip_special_tokens=True))


def _generate(
    model: Any, batch: Mapping[str, Any], *, base: Any, ends: list[int], padding: int, options: dict[str, Any]
) -> torch.Tensor:
    """Generate tokens [rows, length] for a micro-batch."""
    inputs = {name: value for name, value in batch.items() if name not in NOT_FOR_GENERATION}
    found = model.generate(**inputs, **options, synced_gpus=False)
    if not base.config.is_encoder_decoder:
        found = found[:, inputs["input_ids"].shape[1] :]
    return without_rest(found, ends, padding)


def without_rest(tokens: torch.Tensor, ends: list[int], padding: int) -> torch.Tensor:
    """Return tokens [rows, length] in which those after the first end of text are padding."""
    if not ends:
        return tokens
    is_end = torch.isin(tokens, torch.tensor(ends, device=tokens.device))
    after = is_end.cumsum(1) - is_end.long() > 0
    return tokens.masked_fill(after, padding)
