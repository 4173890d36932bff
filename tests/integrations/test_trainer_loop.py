"""`train` with TrainingArguments: the losses of the Trainer, the same bits on any number of processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs pip install 'unisono[hf]'")

import transformers
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    GenerationConfig,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)

from tests.integrations.small_models import Sentences, collate, llama_config, make_llama, make_tokenizer
from tests.ranks.loops import attempt
from unisono import Stream
from unisono.config import LoaderSettings, ParallelSettings
from unisono.environment import World
from unisono.errors import DataError
from unisono.integrations.transformers import PretrainedWeights, settings_from, train, trainer_collator
from unisono.integrations.transformers.training_arguments import HONORED
from unisono.testing import run_promise, run_ranks
from unisono.train.run import Run

FIELDS: dict[str, Any] = {
    "per_device_train_batch_size": 3,
    "gradient_accumulation_steps": 4,
    "max_steps": 7,
    "learning_rate": 2e-2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "logging_steps": 1,
    "save_strategy": "no",
    "seed": 3,
    "use_cpu": True,
    "train_sampling_strategy": "sequential",
}
"""An epoch of 20 samples has two steps; the second one has 8 samples."""


def arguments(folder: Path, kind: type[TrainingArguments] = TrainingArguments, **changes: Any) -> TrainingArguments:
    return kind(output_dir=str(folder / "out"), **{**FIELDS, **changes})


def train_here(
    run: Run[Any],
    args: TrainingArguments,
    base: Path,
    data: Any = None,
    weights: Callable[[Path], PretrainedWeights] = PretrainedWeights,
    **more: Any,
) -> Any:
    """Return everything that was logged, by step; promise; fingerprint; and the last metrics."""
    logged: list[dict[str, float]] = []
    log = run.log

    def keep(values: Any = None, **named: Any) -> None:
        logged.append({**(values or {}), **named})
        log(values, **named)

    run.log = keep  # type: ignore[method-assign]
    model = weights(base).place(run)
    data = Sentences(20) if data is None else data
    found = train(run, args, model, data, **{"data_collator": collate, **more})
    return logged, run_promise(run)[0], run.context.state.fingerprint(), found


def losses_of_trainer(args: TrainingArguments, base: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(base)
    trainer = transformers.Trainer(model, args, data_collator=collate, train_dataset=Sentences(20))
    trainer.train()
    return [each for each in trainer.state.log_history if "loss" in each], model.state_dict()


def compare(world: World, folder: Path, changes: dict[str, Any]) -> Any:
    """Train with the Trainer and here, on one process."""
    base = make_llama(folder / "base")
    torch.set_num_threads(1)
    theirs, weights = losses_of_trainer(arguments(folder / "theirs", disable_tqdm=True, **changes), base)
    args = arguments(folder, **changes)
    ours = attempt(world, folder / "run", partial(train_here, args=args, base=base), settings_from(args)())
    assert not isinstance(ours, str), ours
    written = AutoModelForCausalLM.from_pretrained(folder / "out").state_dict()
    distance = max(float((written[name] - value).abs().max()) for name, value in weights.items())
    return theirs, ours[0], distance


@pytest.mark.ci
@pytest.mark.parametrize(
    "changes",
    [{}, {"label_smoothing_factor": 0.1, "lr_scheduler_type": "linear"}, {"optim": "adamw_torch", "adam_beta1": 0.5}],
    ids=["cosine", "smoothing", "adam"],
)
def test_losses_are_those_of_the_trainer(tmp_path: Path, changes: dict[str, Any]) -> None:
    ((theirs, ours, distance),) = run_ranks(compare, 1, tmp_path, changes)
    assert len(theirs) == len(ours) == 7
    for one, other in zip(theirs, ours, strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            here = other["mean_loss" if name == "loss" else name]
            assert here == pytest.approx(one[name], rel=1e-6, abs=1e-9), name
    assert distance < 1e-5


class Watched(Seq2SeqTrainingArguments):
    """Arguments that note which fields are read."""

    read: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        Watched.read.add(name)
        return super().__getattribute__(name)


def count(prediction: Any) -> dict[str, float]:
    """Return numbers that depend on the order of all predictions."""
    rows = np.arange(1, len(prediction.label_ids) + 1)[:, None]
    return {
        "tokens": float(((prediction.predictions * rows) % 1009).sum()),
        "labels": float(((prediction.label_ids * rows) % 1009).sum()),
    }


def best(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def columns(length: int) -> dict[str, list[Any]]:
    samples = [Sentences(length)[i] for i in range(length)]
    return {**{name: [each[name] for each in samples] for name in samples[0]}, "label": [i % 3 for i in range(length)]}


def table() -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict(columns(20))


def stream() -> Any:
    return Stream.hugging_face(table().to_iterable_dataset(num_shards=3), window=4)


def masks() -> dict[str, Any]:
    return {"data_collator": DataCollatorForLanguageModeling(make_tokenizer(), mlm_probability=0.4)}


def next_tokens() -> dict[str, Any]:
    return {"data_collator": DataCollatorForLanguageModeling(make_tokenizer(), mlm=False)}


def classes() -> dict[str, Any]:
    """The collator of the Trainer for a tokenizer, and metrics from logits."""
    kind = partial(PretrainedWeights, kind=AutoModelForSequenceClassification, num_labels=3)
    metrics = {"compute_metrics": accuracy, "eval_dataset": table().select(range(11))}
    return {"weights": kind, "processing_class": make_tokenizer(), "data_collator": None, **metrics}


def accuracy(prediction: Any) -> dict[str, float]:
    assert prediction.predictions.shape == (11, 3)
    assert prediction.label_ids.tolist() == [i % 3 for i in range(11)]
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def metrics() -> dict[str, Any]:
    sets = {"a": Sentences(7), "b": Sentences(5)}
    return {"eval_dataset": sets, "compute_metrics": count, "preprocess_logits_for_metrics": best}


def texts() -> dict[str, Any]:
    return {"eval_dataset": {"a": Sentences(7), "b": Sentences(5)}, "compute_metrics": count}


Case = tuple[Any, Any, dict[str, Any]]
"""The data, what else `train` gets, and changes of the arguments."""

CASES: dict[str, Case] = {
    "metrics": (partial(Sentences, 20), metrics, {"eval_strategy": "steps", "eval_steps": 3}),
    "generation": (
        partial(Sentences, 20),
        texts,
        {
            "eval_strategy": "epoch",
            "predict_with_generate": True,
            "generation_config": GenerationConfig(max_new_tokens=8),
            "logging_first_step": True,
            "save_strategy": "steps",
            "save_steps": 0.5,
            "save_total_limit": 2,
            "logging_steps": 0.4,
        },
    ),
    "masks": (partial(Sentences, 20), masks, {"train_sampling_strategy": "random"}),
    "datasets": (table, next_tokens, {"train_sampling_strategy": "random"}),
    "stream": (stream, next_tokens, {"train_sampling_strategy": "random"}),
    "classes": (table, classes, {"eval_strategy": "steps", "eval_steps": 3}),
}
IN_CI = ("generation", "datasets")
"""Cases that CI runs; `make slow` runs the others."""


def run_case(world: World, folder: Path, base: Path, name: str, parallel: dict[str, Any], workers: int) -> Any:
    data, more, changes = CASES[name]
    args = arguments(folder, Watched, **changes)
    settings = settings_from(args)()
    settings = replace(settings, parallel=ParallelSettings(**parallel), loader=LoaderSettings(workers=workers))
    result = attempt(world, folder / "run", partial(train_here, args=args, base=base, data=data(), **more()), settings)
    return result, sorted(Watched.read)


EXPECTED = {
    "metrics": {"eval_a_loss", "eval_b_loss", "eval_a_tokens", "eval_b_labels"},
    "generation": {"eval_a_loss", "eval_b_loss", "eval_a_tokens", "eval_b_labels"},
    "classes": {"eval_loss", "eval_accuracy"},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.ci if name in IN_CI else pytest.mark.slow) for name in CASES]
)
def test_bits_do_not_depend_on_the_number_of_processes(tmp_path: Path, name: str) -> None:
    base = make_llama(tmp_path / "base")
    placements: list[tuple[int, dict[str, Any], int]] = [(1, {}, 0), (2, {}, 1), (2, {"shard": 2}, 0)]
    runs = [
        run_ranks(run_case, size, tmp_path / str(i), base, name, parallel, workers)
        for i, (size, parallel, workers) in enumerate(placements)
    ]
    reference, _ = runs[0][0]
    assert not isinstance(reference, str), reference
    assert reference[1] == "exact"
    assert set(reference[3]) == EXPECTED.get(name, set()) | ({"eval_a_labels", "eval_b_tokens"} & set(reference[3]))
    for ranks in runs:
        for result, _ in ranks:
            assert not isinstance(result, str), result
            assert result == reference
    written = [load_file(tmp_path / str(i) / "out" / "model.safetensors") for i in range(3)]
    assert all(torch.equal(other[key], value) for other in written for key, value in written[0].items())


class EndsEarly(Sentences):
    """Sentences that cannot be read any more in the fifth step."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.read = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read += 1
        if self.read > 45:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


def run_with(world: World, folder: Path, base: Path, data: Any, resume: bool) -> Any:
    args = arguments(folder, logging_steps=5, save_strategy="steps", save_steps=2)
    loop = partial(train_here, args=args, base=base, data=data)
    return attempt(world, folder / "run", loop, settings_from(args)(), resume=resume)


@pytest.mark.slow
def test_a_resume_logs_the_mean_of_the_whole_interval(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    (whole,) = run_ranks(run_with, 1, tmp_path / "whole", base, Sentences(20), False)
    assert len(whole[0]) == 2, "in steps 5 and 7"
    (failed,) = run_ranks(run_with, 1, tmp_path / "resumed", base, EndsEarly(20), False)
    assert "the disk is gone" in failed
    for resumed in run_ranks(run_with, 2, tmp_path / "resumed", base, Sentences(20), True):
        assert resumed == whole


@pytest.mark.ci
def test_no_field_is_ignored(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    ((result, read),) = run_ranks(run_case, 1, tmp_path, base, "generation", {}, 0)
    assert not isinstance(result, str), result
    assert set(HONORED) - set(read) == set()


def test_a_collator_with_random_numbers_of_its_own_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(llama_config())
    masks = DataCollatorForLanguageModeling(make_tokenizer(), seed=3)
    with pytest.raises(DataError, match="leave seed out"):
        trainer_collator(model, masks)


def test_columns_that_the_model_does_not_use_are_left_out() -> None:
    tokenizer = make_tokenizer()
    model = AutoModelForCausalLM.from_config(llama_config())
    samples = [Sentences(4)[i] for i in range(4)]
    padded = trainer_collator(model, None, tokenizer)(samples)
    assert {name: tuple(value.shape) for name, value in padded.items()} == {
        "input_ids": (4, 12),
        "attention_mask": (4, 12),
    }
    labeled = [{**each, "labels": each["input_ids"][1:]} for each in samples]
    batch = trainer_collator(model, DataCollatorForSeq2Seq(tokenizer, model))(labeled)
    assert batch["labels"].tolist()[1] == samples[1]["input_ids"][1:] + [-100] * 8
    assert "unused" not in batch
