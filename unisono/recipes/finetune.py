"""Fine-tune a pretrained language model with LoRA, on documents that are packed into rows.

    unisono run finetune --ranks 2                                      about a minute on two cores
    unisono run finetune --ranks 2 --set base=FOLDER                    a causal model of Hugging Face
    unisono copy finetune mine.py                                       then edit it and: unisono run mine.py

Data     docstrings of Python's standard library; the prompt is the topic; no download
Model    a Llama of 0.4 million parameters that is made here, from the source code that comes with Python: bytes, no hub
Result   2.90 bits per byte of held-out docstrings; the base model has 3.62

Needs: pip install 'unisono[hf,adapters]'
"""

from __future__ import annotations

import contextlib
import math
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import unisono
from unisono.recipes.datasets.docstrings import load_docstrings
from unisono.recipes.datasets.python_source import load_python_source

try:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoTokenizer, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

    from unisono.integrations.transformers import PretrainedWeights, generate_texts, save_pretrained
except ImportError as error:
    facts, install = f"{error}.", "pip install 'unisono[hf,adapters]'"
    raise unisono.SettingsError("The recipe finetune needs transformers and peft.", facts, install) from error

IGNORED = -100  # the label of a token that is not learned
OPEN_ROWS = 32  # rows that packing tries to fill


@dataclass(frozen=True, kw_only=True)
class Lora:
    rank: int = 16  # rank of the matrices of the adapter
    alpha: int = 32  # the adapter is multiplied by alpha / rank
    dropout: float = 0.0  # dropout probability before the adapter
    modules: str = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"  # names of the layers with an adapter


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    base: str = ""  # folder with a pretrained model; empty: a small one is made
    base_steps: int = 300  # steps that the small one is trained for
    length: int = 256  # tokens of a row
    batch: int = 16  # global batch size, in rows
    steps: int | None = 150
    lr: float = 5e-3  # peak learning rate of the one-cycle schedule
    clip: float | None = 1.0
    valid_documents: int = 400  # number of held-out documents to use; 0: all
    lora: Lora = Lora()


def main(run: unisono.Run[Settings]) -> None:
    settings = run.settings
    base = Path(settings.base or run.dir / "base")
    if settings.base and not (base / "config.json").is_file():
        facts = f"The folder {base.resolve()} {'has no config.json' if base.is_dir() else 'does not exist'}."
        raise unisono.SettingsError(f"There is no model in base={base}.", facts, f"hf download NAME --local-dir {base}")
    with run.first():
        if not base.is_dir():
            run.print(f"training a base model for {settings.base_steps} steps, into {base}")
            draft = base.with_name(f"base.{uuid.uuid4()}")
            make_base(draft, settings)
            with contextlib.suppress(OSError):  # another host was faster
                draft.rename(base)  # at the end, so that a kill leaves no part of a model there
            shutil.rmtree(draft, ignore_errors=True)
    tokenizer = AutoTokenizer.from_pretrained(base)
    corpus = load_docstrings()
    run.print(corpus.summary())
    held_out = (
        corpus.valid[:: max(1, len(corpus.valid) // settings.valid_documents)]
        if settings.valid_documents
        else (corpus.valid)
    )
    rows, valid_rows = (
        pack([tokenize(tokenizer, corpus.topics[topic], text, settings.length) for text, topic in documents], settings)
        for documents in (corpus.train, held_out)
    )
    filled = sum(len(tokens) for row in rows for tokens, _ in row) / (len(rows) * settings.length)
    run.print(f"{len(corpus.train):,} documents in {len(rows):,} rows of {settings.length} tokens, {filled:.0%} filled")

    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora.rank,
        lora_alpha=settings.lora.alpha,
        lora_dropout=settings.lora.dropout,
        target_modules=settings.lora.modules.split(","),
    )
    model: Any = PretrainedWeights(base).place(run, wrap=lambda built: get_peft_model(built, lora))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.lr, total_steps=run.count_steps(rows))
    run.track(model=model, optimizer=optimizer, schedule=schedule)

    def collate(packed: list[list[Document]]) -> dict[str, Tensor]:
        return as_batch(packed, settings.length, tokenizer.pad_token_id or 0)

    before = run.evaluate(model, valid_rows, bits_per_token, forward=logits, collate_fn=collate)
    for step in run.steps(rows, collate_fn=collate):
        step.run(model, loss_sum, forward=logits)
        step.update(optimizer, schedule, clip=settings.clip)
        run.log(loss=step.loss)

    after = run.evaluate(model, valid_rows, bits_per_token, forward=logits, collate_fn=collate)
    run.log(after, base_bits_per_token=before["bits_per_token"])
    run.print(
        f"validation: {after['bits_per_token']:.3f} bits per token of {len(held_out)} held-out documents; "
        f"the base model: {before['bits_per_token']:.3f}"
    )
    if settings.parallel.pipeline == 1:  # a pipeline has no cache
        show_texts(run, model, tokenizer, corpus.topics)
    save_pretrained(run, model, run.dir / "adapter", tokenizer)


Document = tuple[list[int], int]
"""The tokens of a document, and how many at its beginning are the prompt, which is not learned."""


def tokenize(tokenizer: Any, topic: str, text: str, length: int) -> Document:
    """Return the tokens of a prompt and a text, at most `length`, and the number of tokens of the prompt."""
    prompt = tokenizer(f"{topic}: ", add_special_tokens=False)["input_ids"]
    rest = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*prompt, *rest, tokenizer.eos_token_id][:length], len(prompt)


def pack(documents: list[Document], settings: Settings) -> list[list[Document]]:
    """Put documents into rows of at most settings.length tokens: each into the first open row with room for it."""
    rows: list[list[Document]] = []
    room: list[int] = []
    for document in documents:
        size = len(document[0])
        found = next((i for i in range(max(0, len(rows) - OPEN_ROWS), len(rows)) if room[i] >= size), len(rows))
        if found == len(rows):
            rows.append([])
            room.append(settings.length)
        rows[found].append(document)
        room[found] -= size
    return rows


def as_batch(packed: list[list[Document]], length: int, padding: int) -> dict[str, Tensor]:
    """Collate rows of documents into int64 [rows, length] each: tokens, positions, and labels.

    Positions restart with each document. Where they do, transformers divides the attention mask into blocks, so a
    token attends to its own document alone. Padding is a document of its own, without labels. The first token of a
    document has no label, because the token before it belongs to another one.
    """
    tokens = torch.full((len(packed), length), padding)
    labels = torch.full((len(packed), length), IGNORED)
    positions = torch.zeros(len(packed), length, dtype=torch.int64)
    for row, documents in enumerate(packed):
        begin = 0
        for ids, prompt in documents:
            end = begin + len(ids)
            tokens[row, begin:end] = torch.tensor(ids)
            labels[row, begin + max(prompt, 1) : end] = tokens[row, begin + max(prompt, 1) : end]
            positions[row, begin:end] = torch.arange(len(ids))
            begin = end
        positions[row, begin:] = torch.arange(length - begin)
    return {"input_ids": tokens, "position_ids": positions, "labels": labels}


def logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return logits [rows, length, vocabulary]. Without an attention mask, positions divide a row into documents."""
    output: Tensor = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    return output


def loss_sum(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of the cross entropy, in nats, and the number of labels."""
    labels = batch["labels"][:, 1:].flatten()
    loss = F.cross_entropy(output[:, :-1].flatten(0, 1).float(), labels, ignore_index=IGNORED, reduction="sum")
    return loss, (labels != IGNORED).sum()


def bits_per_token(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of the cross entropy, in bits, and the number of labels."""
    nats, count = loss_sum(output, batch)
    return nats / math.log(2), count


def show_texts(run: unisono.Run[Settings], model: Any, tokenizer: Any, topics: tuple[str, ...]) -> None:
    """Print a text that the model continues from each topic."""
    tokenizer.padding_side = "left"

    def collate(prompts: list[str]) -> dict[str, Tensor]:
        return dict(tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt"))

    prompts = [f"{topic}: " for topic in topics]
    texts = generate_texts(run, model, prompts, tokenizer, collate_fn=collate, max_new_tokens=40, do_sample=True)
    for prompt, text in zip(prompts, texts, strict=True):
        run.print(f"  {prompt}{' '.join(text.split())}")


def make_base(folder: Path, settings: Settings) -> None:
    """Train a small Llama on bytes of Python's source code in this process, and save it with a tokenizer."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=max(1024, settings.length),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(settings.seed)
        source = torch.frombuffer(bytearray(load_python_source().train), dtype=torch.uint8).long() + 3  # ByT5's bytes
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=max(2, settings.base_steps))
        for _ in range(settings.base_steps):
            starts = torch.randint(len(source) - 128, (16, 1))
            tokens = source[starts + torch.arange(128)]
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


if __name__ == "__main__":
    unisono.main(main, Settings)
