"""Small models of transformers in folders, with their data: what a download would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 40
LENGTHS = (9, 4, 12, 7, 3, 11, 5, 8, 6, 10)
"""Tokens of the first samples. They repeat, so that micro-batches have unequal numbers of tokens."""


def llama_config(**changes: Any) -> Any:
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return transformers.LlamaConfig(**{**sizes, **changes})


def make_llama(folder: Path, *, shard_size: str = "5GB", **changes: Any) -> Path:
    """Write a Llama with random weights to a folder."""
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(5)
        transformers.LlamaForCausalLM(llama_config(**changes)).save_pretrained(folder, max_shard_size=shard_size)
    return folder


class Sentences(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Sequences of several lengths, as a tokenizer returns them."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        if i >= self.length:
            raise IndexError(i)
        size = LENGTHS[i % len(LENGTHS)]
        ids = [3 + (7 * i + j * j + 3 * j) % (VOCABULARY - 3) for j in range(size)]
        return {"input_ids": ids, "attention_mask": [1] * size, "unused": [i]}


def make_tokenizer() -> Any:
    """Return a tokenizer of words w3, w4, ... with tokens for padding, beginning, end and masks."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>"]
    words = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(3, VOCABULARY - 1)), "<mask>"])}
    core = Tokenizer(models.WordLevel(words, unk_token="w3"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        mask_token="<mask>",
    )


def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad on the right; labels are the tokens."""
    longest = max(len(each["input_ids"]) for each in samples)
    ids = torch.tensor([each["input_ids"] + [0] * (longest - len(each["input_ids"])) for each in samples])
    mask = torch.tensor([[1] * len(each["input_ids"]) + [0] * (longest - len(each["input_ids"])) for each in samples])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
