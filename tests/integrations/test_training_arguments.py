"""Fields of TrainingArguments: each is used, says what a run does in any case, or is refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs pip install 'unisono[hf]'")

from transformers import Seq2SeqTrainingArguments, TrainingArguments

import unisono
from unisono.errors import SettingsError
from unisono.integrations.transformers import settings_from
from unisono.integrations.transformers.training_arguments import HONORED, REMEDIES, is_harmless

FIELDS = {each.name for kind in (TrainingArguments, Seq2SeqTrainingArguments) for each in dataclasses.fields(kind)}
HARMLESS = {"do_train", "do_eval", "do_predict", "dataloader_persistent_workers", "full_determinism", "data_seed"}
"""Fields whose first other value says what a run does in any case."""


def arguments(kind: type[TrainingArguments] = TrainingArguments, **fields: Any) -> TrainingArguments:
    return kind(output_dir="out", **{"use_cpu": True, **fields})


def other_value(value: Any) -> Any:
    """Return a value that differs from the default of a field."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return ["other"] if isinstance(value, list) else "other"


@pytest.fixture(scope="module")
def default() -> TrainingArguments:
    return arguments(Seq2SeqTrainingArguments)


@pytest.mark.parametrize("name", sorted(FIELDS - HONORED - HARMLESS - {"use_cpu"}))
def test_every_field_that_is_not_used_is_refused_by_name(default: TrainingArguments, name: str) -> None:
    changed = dataclasses.replace(default)
    setattr(changed, name, other_value(getattr(default, name)))
    with pytest.raises(SettingsError) as caught:
        settings_from(changed)
    assert f"TrainingArguments.{name} is not supported." in [each.error for each in caught.value.problems]


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_what_a_run_does_in_any_case_is_accepted(default: TrainingArguments, name: str) -> None:
    changed = dataclasses.replace(default)
    setattr(changed, name, default.seed if name == "data_seed" else True)
    assert is_harmless(changed, name)
    settings_from(changed)


def test_the_tables_name_fields_that_exist() -> None:
    assert HONORED <= FIELDS
    assert set(REMEDIES) <= FIELDS - HONORED


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        settings_from(arguments(fsdp="full_shard", num_train_epochs=2.5, optim="adafactor", push_to_hub=True))
    text = str(caught.value)
    for words in ("fsdp", "parallel.shard", "num_train_epochs", "2.5", "'adafactor'", "push_to_hub"):
        assert words in text


def test_fields_become_settings() -> None:
    made = settings_from(
        arguments(
            per_device_train_batch_size=4,
            gradient_accumulation_steps=3,
            num_train_epochs=2,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            warmup_steps=0.1,
            max_grad_norm=0.5,
            bf16=True,
            activation_checkpointing=True,
            save_strategy="epoch",
            save_total_limit=3,
            seed=7,
            dataloader_num_workers=2,
            dataloader_prefetch_factor=4,
            report_to=["tensorboard", "mlflow"],
        ),
        processes=2,
        samples=100,
    )()
    assert (made.batch, made.micro_batch, made.virtual_ranks) == (24, 4, 6)
    assert (made.epochs, made.steps, made.seed, made.precision, made.clip) == (2, None, 7, "bf16", 0.5)
    assert (made.checkpoint.every, made.checkpoint.keep) == (5, 3)
    assert (made.loader.workers, made.loader.prefetch, made.track) == (2, 4, "tensorboard,mlflow")
    assert made.parallel.activation_checkpoint == "full"
    values: Any = made
    assert (values.learning_rate, values.lr_scheduler_type, values.warmup_steps) == (1e-3, "cosine", 0.1)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_steps": 40, "save_steps": 0.1}, 4),
        ({"max_steps": 40, "save_steps": 15}, 15),
        ({"max_steps": 40, "save_strategy": "no"}, 0),
    ],
)
def test_intervals_of_checkpoints(fields: dict[str, Any], expected: int) -> None:
    assert settings_from(arguments(**fields))().checkpoint.every == expected


def test_an_interval_that_depends_on_the_data_needs_its_length() -> None:
    with pytest.raises(SettingsError, match="samples=len"):
        settings_from(arguments(save_strategy="epoch"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(unisono.Settings):
    virtual_ranks: int = 4
    corpus: Path = Path("texts")


def test_settings_of_the_script_stay() -> None:
    made: Any = settings_from(arguments(max_steps=3), Own)()
    assert made.corpus == Path("texts")
    assert made.steps == 3
    assert isinstance(made, Own)
