"""TrainingArguments of transformers as settings of a run. A field without a counterpart is refused by name.

    TrainingArguments                                       Settings
    per_device_train_batch_size  b, largest forward pass    micro_batch = b
    gradient_accumulation_steps  a                          virtual_ranks = a * p
    processes                    p, that it was written for batch = b * a * p

So one virtual rank computes what one process of the Trainer computed in one forward pass, and the batch does not depend
on the number of processes of this run.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, get_type_hints

import torch
from transformers import SchedulerType, TrainingArguments
from transformers.training_args import OptimizerNames

from unisono.config import Settings
from unisono.errors import Problem, SettingsError

OWN = {
    "learning_rate": float,
    "lr_scheduler_type": str,
    "warmup_steps": float,
    "weight_decay": float,
    "adam_beta1": float,
    "adam_beta2": float,
    "adam_epsilon": float,
    "optim": str,
    "label_smoothing_factor": float,
}
"""Fields that become settings of the same name, which `--set` changes."""

HONORED = {
    *OWN,
    *("output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps"),
    *("lr_scheduler_kwargs", "max_grad_norm", "bf16", "fp16", "seed", "torch_compile"),
    *("activation_checkpointing", "gradient_checkpointing"),
    *("logging_strategy", "logging_steps", "logging_first_step", "report_to"),
    *("eval_strategy", "eval_steps", "prediction_loss_only"),
    *("save_strategy", "save_steps", "save_total_limit"),
    *("dataloader_num_workers", "dataloader_prefetch_factor", "remove_unused_columns", "train_sampling_strategy"),
    *("predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config"),
}
"""Fields that are used."""

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Values of `optim`: optimizers of torch, whose step is one for each element."""

TRACKERS = ("tensorboard", "mlflow", "wandb", "trackio")
"""Values of `report_to`."""

SCHEDULES_BY_METRIC = ("reduce_lr_on_plateau", "greedy")
"""Schedules that step with a metric instead of with the step."""

REMEDIES = {
    "auto_find_batch_size": "unisono plan finds the largest micro-batch that fits: --set micro_batch=N",
    "average_tokens_across_devices": "leave it out: the loss is divided by the tokens of the whole batch",
    "data_seed": "leave it out: the order of the data follows from seed",
    "dataloader_drop_last": "leave it out: the last batch of an epoch is short, and none of its samples is lost",
    "ddp_backend": "--set backend=gloo, nccl, ucc, mpi or tcp",
    "ddp_bucket_cap_mb": "--set tree.bucket_mb=N",
    "ddp_timeout": "--set watchdog.timeout=SECONDS",
    "deepspeed": "--set parallel.shard=N divides the model and the optimizer's state over N processes",
    "fsdp": "--set parallel.shard=N divides the model and the optimizer's state over N processes",
    "fsdp_config": "--set parallel.shard=N; --set 'parallel.layer_classes=[\"CLASS\"]' names the layers",
    "eval_delay": "leave it out, or write the loop: docs/guide/loop.md",
    "load_best_model_at_end": "leave it out; checkpoint.keep_every keeps checkpoints to choose from",
    "optim_args": "leave it out, or build the optimizer in a loop of your own: docs/guide/loop.md",
    "parallelism_config": "--set parallel.shard=N, parallel.tensor=N, parallel.pipeline=N or parallel.context=N",
    "per_device_eval_batch_size": "leave it out: an evaluation has micro-batches of the size of training",
    "push_to_hub": "leave it out, and upload the folder output_dir: hf upload NAME output_dir",
    "resume_from_checkpoint": "leave it out, and type --resume",
    "torch_compile_mode": "leave it out: --set speed.compile_model=true compiles in the mode default",
    "use_cpu": "leave it out; CUDA_VISIBLE_DEVICES= hides accelerators",
}
"""What to do instead of a field that is refused."""


def settings_from(
    args: TrainingArguments, base: type[Settings] = Settings, *, processes: int = 1, samples: int | None = None
) -> type[Settings]:
    """Return a class of settings for `unisono.main` whose defaults are those of TrainingArguments.

    `--set` and settings files override them as those of any script.

    Args:
        args: The arguments. All fields that differ from their defaults are used, or refused.
        base: The class to inherit from, with settings of the script's own.
        processes: The number of processes that the Trainer would run on. The global batch is
            per_device_train_batch_size * gradient_accumulation_steps * processes.
        samples: The length of the training set. Only needed if checkpoints are saved once an epoch, or at a fraction of
            all steps.

    Raises:
        SettingsError: A field has no counterpart, or a value is not supported. All of them are named.
    """
    problems = [*_refusals(args), *_problems_of_values(args, processes, samples)]
    if problems:
        raise SettingsError.of(problems)
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * processes
    steps = args.max_steps if args.max_steps > 0 else None
    total = steps if steps is not None or samples is None else int(args.num_train_epochs) * -(-samples // batch)
    values: dict[str, Any] = {
        "steps": steps,
        "epochs": None if steps is not None else int(args.num_train_epochs),
        "batch": batch,
        "micro_batch": args.per_device_train_batch_size,
        "virtual_ranks": args.gradient_accumulation_steps * processes,
        "seed": args.seed,
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        "clip": args.max_grad_norm or None,
        "checkpoint": {"every": _save_steps(args, batch, samples, total), "keep": args.save_total_limit or ALL},
        "loader": {
            "workers": args.dataloader_num_workers,
            "prefetch": args.dataloader_prefetch_factor or _default(base, "loader").prefetch,
        },
        "parallel": {"activation_checkpoint": "full"} if _recomputes(args) else {},
        "speed": {"compile_model": True} if args.torch_compile else {},
        "track": ",".join(_trackers(args)),
    }
    own = [(name, kind, dataclasses.field(default=kind(_plain(args, name)))) for name, kind in OWN.items()]
    types = get_type_hints(base)
    inherited = [(name, types[name], _field(base, name, value)) for name, value in values.items()]
    made = dataclasses.make_dataclass(
        "TrainerSettings", [*inherited, *own], bases=(base,), frozen=True, kw_only=True, namespace={"__doc__": DOC}
    )
    made.__module__ = base.__module__
    return made


DOC = """Settings that follow from TrainingArguments."""

ALL = 1_000_000
"""Checkpoints to keep without save_total_limit: all."""


def with_settings(args: TrainingArguments, settings: Settings) -> TrainingArguments:
    """Return a copy of the arguments with the values that the settings of a run have for them.

    Raises:
        SettingsError: The settings do not come from `settings_from`.
    """
    lost = [name for name in OWN if not hasattr(settings, name)]
    if lost:
        raise SettingsError(
            "The settings of this run do not come from its TrainingArguments.",
            f"The class {type(settings).__name__} has no {lost[0]}.",
            "unisono.main(main, settings_from(ARGUMENTS))",
        )
    found = copy.copy(args)
    for name in OWN:
        setattr(found, name, getattr(settings, name))
    if problems := list(_problems_of_choices(found)):
        raise SettingsError.of(problems)
    found.lr_scheduler_type = SchedulerType(found.lr_scheduler_type)
    found.optim = OptimizerNames(found.optim)
    return found


def _recomputes(args: TrainingArguments) -> bool:
    """Return whether activations are recomputed; gradient_checkpointing is the older name."""
    return bool(args.gradient_checkpointing or getattr(args, "activation_checkpointing", False))


def _trackers(args: TrainingArguments) -> list[str]:
    """Return the names of trackers, which TrainingArguments has made a list."""
    names: Any = args.report_to
    return list(names)


def _plain(args: TrainingArguments, name: str) -> Any:
    """Return the value of a field, and of a choice its name."""
    value = getattr(args, name)
    return getattr(value, "value", value)


def _default(base: type[Settings], name: str) -> Any:
    """Return the default of a field of a settings class."""
    found: Any = next(each for each in dataclasses.fields(base) if each.name == name)
    return found.default if found.default is not dataclasses.MISSING else found.default_factory()


def _field(base: type[Settings], name: str, value: Any) -> Any:
    """Return a field like that of the base, with another default; a dict changes parts of a section."""
    metadata = next(each.metadata for each in dataclasses.fields(base) if each.name == name)
    if isinstance(value, dict):
        section = dataclasses.replace(_default(base, name), **value)
        return dataclasses.field(default_factory=lambda: section, metadata=metadata)
    return dataclasses.field(default=value, metadata=metadata)


def _save_steps(args: TrainingArguments, batch: int, samples: int | None, total: int | None) -> int:
    strategy = _plain(args, "save_strategy")
    if strategy == "no":
        return 0
    if strategy == "epoch":
        return -(-(samples or 0) // batch)
    return interval(args.save_steps, total or 0)


def interval(steps: float, total: int) -> int:
    """Return a number of steps that TrainingArguments state as such, or as a fraction of all steps."""
    return int(steps) if steps >= 1 else max(1, math.ceil(total * steps))


# -- refusals


def _refusals(args: TrainingArguments) -> Iterator[Problem]:
    """Yield a problem for every field that differs from its default and is not used."""
    kind = next(each for each in type(args).__mro__ if each.__module__.startswith("transformers."))
    default = kind(output_dir=args.output_dir, use_cpu=args.use_cpu)
    for each in dataclasses.fields(kind):
        value = getattr(args, each.name)
        if each.name in HONORED or value == getattr(default, each.name) or is_harmless(args, each.name):
            continue
        yield Problem(
            f"TrainingArguments.{each.name} is not supported.",
            f"It is {_short(value)}, and its default {_short(getattr(default, each.name))}.",
            REMEDIES.get(each.name, "leave it out, or write the loop yourself: docs/start/from-trainer.md"),
        )


def is_harmless(args: TrainingArguments, name: str) -> bool:
    """Return whether the value of a field that is not used says what a run does in any case."""
    value = getattr(args, name)
    if name in ("do_train", "do_eval", "do_predict"):  # for scripts; the Trainer does not use them
        return True
    if name in ("dataloader_persistent_workers", "full_determinism"):
        return value is True
    if name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        return value in (None, {"use_reentrant": False})
    if name == "torch_compile_backend":
        return bool(args.torch_compile) and value == "inductor"
    if name == "per_device_eval_batch_size":
        return bool(value == args.per_device_train_batch_size)
    if name == "data_seed":
        return bool(value == args.seed)
    if name == "use_cpu":
        return not torch.accelerator.is_available()
    return False


def _short(value: Any) -> str:
    text = repr(getattr(value, "value", value))
    return text if len(text) < 80 else f"{text[:77]}..."


def _problems_of_choices(args: TrainingArguments) -> Iterator[Problem]:
    """Yield a problem for each name of an optimizer, a schedule or an order that is not known here."""
    schedules = tuple(each.value for each in SchedulerType if each.value not in SCHEDULES_BY_METRIC)
    orders = ("random", "sequential")
    known = {"optim": OPTIMIZERS, "lr_scheduler_type": schedules, "train_sampling_strategy": orders}
    for field, values in known.items():
        if hasattr(args, field) and (value := _plain(args, field)) not in values:
            facts = f"It is {value!r}; {', '.join(values)} are known."
            yield Problem(f"TrainingArguments.{field} is not supported.", facts, f"{field}={values[0]!r}")


def _problems_of_values(args: TrainingArguments, processes: int, samples: int | None) -> Iterator[Problem]:
    """Yield a problem for each value of a field that is used, but not with this value."""
    name = "TrainingArguments"
    if args.max_steps <= 0 and (args.num_train_epochs < 1 or args.num_train_epochs != int(args.num_train_epochs)):
        facts = f"It is {args.num_train_epochs}, and a run has whole epochs, at least one."
        yield Problem(f"{name}.num_train_epochs is not supported.", facts, "max_steps=N ends a run anywhere.")
    yield from _problems_of_choices(args)
    if unknown := [each for each in _trackers(args) if each not in TRACKERS]:
        facts = f"It names {', '.join(unknown)}; {', '.join(TRACKERS)} are known."
        yield Problem(f"{name}.report_to is not supported.", facts, "report_to='none', or --set track=MODULE:CLASS")
    strategy = _plain(args, "save_strategy")
    if strategy == "best":
        facts = "It is 'best', and checkpoints are saved at intervals."
        yield Problem(f"{name}.save_strategy is not supported.", facts, "save_strategy='steps'")
    unknown_length = samples is None and (args.max_steps <= 0 or strategy == "epoch")
    if unknown_length and (strategy == "epoch" or (strategy == "steps" and args.save_steps < 1)):
        facts = f"save_strategy={strategy!r} with save_steps={args.save_steps} depends on the length of the data."
        yield Problem(f"{name}.save_steps is not known.", facts, "settings_from(args, samples=len(train_dataset))")
    if processes < 1:
        yield Problem(f"processes cannot be {processes}.", "It is a number of processes.", "processes=1")
