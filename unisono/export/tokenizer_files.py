"""The tokenizer of a model of transformers, which an export writes beside the weights.

--tokenizer FOLDER    if the command names one
RUN/tokenizer         if the script has written it: tokenizer.save_pretrained(run.dir / "tokenizer")
the model's folder    if the script has loaded the model with from_pretrained(FOLDER), and it has a tokenizer
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unisono.errors import LoopError
from unisono.export.formats import ExportRequest

IN_RUN_DIR = "tokenizer"
"""The folder in the run directory."""

FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
"""Files, of which a folder with a tokenizer has one."""

TEXT = "The quick brown fox jumps over the lazy dog. 0123456789"
"""A text whose tokens a fresh process compares."""


def tokenizer_folder(request: ExportRequest, model: Any) -> Path | None:
    """Return the folder with the tokenizer of a model; None if there is none."""
    places = [request.tokenizer] if request.tokenizer else [f"{request.run_dir}/{IN_RUN_DIR}", model.name_or_path]
    for place in places:
        if place and any(Path(place, name).is_file() for name in FILES):
            return Path(place)
    return None


def tokenizer_of(request: ExportRequest, model: Any) -> Any:
    """Load the tokenizer of a model; None if there is none.

    Raises:
        LoopError: transformers cannot load it, or it has more tokens than the model.
    """
    from transformers import AutoTokenizer

    folder = tokenizer_folder(request, model)
    if folder is None:
        return None
    do = "--tokenizer FOLDER, with the files that tokenizer.save_pretrained(FOLDER) writes"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise many kinds
        lines = str(error).strip().splitlines() or ["no reason is given"]
        fact = f"{type(error).__name__}: {lines[0]}"
        raise LoopError(f"Cannot load the tokenizer in {folder}.", fact, do) from error
    if len(tokenizer) > model.config.vocab_size:
        fact = f"It has {len(tokenizer):,} tokens, and the model {model.config.vocab_size:,}."
        raise LoopError(f"The tokenizer in {folder} does not belong to the model.", fact, do)
    return tokenizer


def write_tokenizer(request: ExportRequest, model: Any, path: Path) -> str:
    """Write the tokenizer of a model to a folder, and beside the folder tokens to compare. Return its class, or ""."""
    tokenizer = tokenizer_of(request, model)
    if tokenizer is None:
        return ""
    tokenizer.save_pretrained(path)
    tokens = {"text": TEXT, "ids": tokenizer(TEXT)["input_ids"]}
    path.with_name("tokens.json").write_text(json.dumps(tokens), encoding="utf-8")
    return type(tokenizer).__name__
