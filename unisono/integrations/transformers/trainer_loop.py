"""The loop of transformers' Trainer with a run: the same optimizer, schedule, loss and intervals.

Training, evaluation and writing are those of any script. So is the order of the data: a permutation that depends on the
seed alone, and not that of torch's RandomSampler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.optimization import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names
from transformers.trainer_utils import EvalPrediction
from transformers.training_args import OptimizerNames

from unisono.config import plural
from unisono.errors import LoopError
from unisono.integrations.transformers.collation import ColumnCollator, base_of, trainer_collator
from unisono.integrations.transformers.model_loss import IGNORED, ModelLoss
from unisono.integrations.transformers.padded_predictions import predict_padded
from unisono.integrations.transformers.pretrained_writer import problem_of, save_pretrained
from unisono.integrations.transformers.text_generation import generate_tokens
from unisono.integrations.transformers.training_arguments import interval, with_settings
from unisono.train.run import Run
from unisono.train.step import Step

NO_DECAY = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""Patterns of names of parameters without weight decay, in lower case: those of the Trainer."""


PLAIN: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
"""Optimizers that get nothing but their learning rate and weight decay, as in the Trainer."""


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a model at intervals.

    Attributes:
        args: The arguments.
        data: A data set, or several by name.
        collator: The collator.
        loss: The loss.
        compute_metrics: EvalPrediction -> a dict of numbers.
        preprocess: (logits, labels) -> what is gathered as predictions.
        tokenizer: The tokenizer, which has the token for padding.
    """

    args: TrainingArguments
    data: Any
    collator: ColumnCollator
    loss: ModelLoss
    compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None
    preprocess: Callable[[Any, Any], Any] | None
    tokenizer: Any

    def __call__(self, run: Run[Any], model: torch.nn.Module) -> dict[str, float]:
        """Return the metrics of all data sets, with the names that the Trainer gives them: eval_loss, ..."""
        found: dict[str, float] = {}
        sets = self.data if isinstance(self.data, Mapping) else {"": self.data}
        for name, data in sets.items():
            prefix = f"eval_{name}_" if name else "eval_"
            found |= {f"{prefix}{key}": value for key, value in self._metrics(run, model, data).items()}
        return found

    def _metrics(self, run: Run[Any], model: torch.nn.Module, data: Any) -> dict[str, float]:
        found = run.evaluate(model, data, self.loss.measure, forward=self.loss.forward, collate_fn=self.collator)
        if self.compute_metrics is None or self.args.prediction_loss_only:
            return found
        if getattr(self.args, "predict_with_generate", False):
            predictions = generate_tokens(run, model, data, collate_fn=self.collator, **self._options())
            labels = predict_padded(run, model, data, forward=_labels_of, collate_fn=self.collator, padding=IGNORED)
        else:
            predictions, labels = predict_padded(
                run, model, data, forward=self._outputs, collate_fn=self.collator, padding=IGNORED
            )
        prediction = EvalPrediction(predictions=_numpy(predictions), label_ids=_numpy(labels))
        return {**found, **self.compute_metrics(prediction)}

    def _options(self) -> dict[str, Any]:
        """Return the options of `generate`."""
        names = {"max_length": "generation_max_length", "num_beams": "generation_num_beams"}
        found = {name: getattr(self.args, field, None) for name, field in names.items()}
        found["generation_config"] = getattr(self.args, "generation_config", None)
        found["pad_token_id"] = getattr(self.tokenizer, "pad_token_id", None)
        return {name: value for name, value in found.items() if value is not None}

    def _outputs(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> Any:
        """Return logits, or what `preprocess` makes of them, and labels."""
        output = model(**batch)
        logits = output["logits"] if isinstance(output, Mapping) else output[1]
        labels = _labels_of(model, batch)
        return (logits if self.preprocess is None else self.preprocess(logits, labels)), labels


def train(
    run: Run[Any],
    args: TrainingArguments,
    model: Any,
    train_dataset: Any,
    *,
    eval_dataset: Any = None,
    data_collator: Callable[[list[Any]], Any] | None = None,
    processing_class: Any = None,
    compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None = None,
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
) -> dict[str, float]:
    """Train a placed model as `Trainer(...).train()` would, and write it to `args.output_dir`.

    Args:
        run: The run, with settings from `settings_from(args)`.
        args: The arguments.
        model: The placed model: `PretrainedWeights(...).place(run)`, or `run.place(...)`.
        train_dataset: A map-style data set with columns, or a Stream.
        eval_dataset: The data for evaluations, or several sets by name.
        data_collator: A collator; by default that of the Trainer.
        processing_class: The tokenizer, which is written beside the model.
        compute_metrics: EvalPrediction -> a dict of numbers, called on every process with all predictions.
        preprocess_logits_for_metrics: (logits, labels) -> what is gathered as predictions.

    Returns:
        The metrics of the last evaluation; {} without one.

    Raises:
        LoopError: The model cannot be trained like this.
        SettingsError: The settings do not come from `settings_from`.
        DataError: The collator has random numbers of its own.
    """
    args = with_settings(args, run.settings)
    _refuse(run, model)
    if processing_class is not None and run.context.group.rank == 0:  # for unisono export
        processing_class.save_pretrained(run.dir / "tokenizer")
    if hasattr(config := base_of(model).config, "use_cache"):
        config.use_cache = False
    collator = trainer_collator(model, data_collator, processing_class, keep=not args.remove_unused_columns)
    loss = ModelLoss(model, args.label_smoothing_factor)
    total = run.count_steps(train_dataset)
    optimizer = build_optimizer(model, args)
    options: Any = args.lr_scheduler_kwargs or None
    schedule: Any = get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        args.get_warmup_steps(total),
        total,
        scheduler_specific_kwargs=options,
    )
    window, found = LossWindow(), dict[str, float]()
    run.track(model=model, optimizer=optimizer, schedule=schedule, losses=window)
    evaluator = Evaluator(
        args, eval_dataset, collator, loss, compute_metrics, preprocess_logits_for_metrics, processing_class
    )
    logs, evaluates = Interval.of(args, "logging", total), Interval.of(args, "eval", total)
    shuffle = str(getattr(args, "train_sampling_strategy", "random")) != "sequential"
    for step in run.steps(train_dataset, shuffle=shuffle, collate_fn=collator):
        step.run(model, loss, forward=loss.forward, mean=True)
        window.add(step.loss)
        if logs.due(step) or (args.logging_first_step and step.number == 0):
            run.log(mean_loss=window.mean(), grad_norm=step.grad_norm, learning_rate=schedule.get_last_lr()[0])
        step.update(optimizer, schedule)
        if eval_dataset is not None and evaluates.due(step):
            found = evaluator(run, model)
            run.log(found)
    _write(run, model, args, processing_class)
    return found


class LossWindow:
    """The mean of the losses since it was logged last. Checkpoints have their sum, so a resume continues it."""

    def __init__(self) -> None:
        self._total, self._count = 0.0, 0

    def add(self, loss: float) -> None:
        self._total, self._count = self._total + loss, self._count + 1

    def mean(self) -> float:
        """Return the mean, and start a new one."""
        mean = self._total / self._count
        self._total, self._count = 0.0, 0
        return mean

    def state_dict(self) -> dict[str, Any]:
        """Return the sum of the losses and their number."""
        return {"total": self._total, "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the mean of a checkpoint."""
        self._total, self._count = state["total"], state["count"]


@dataclass(frozen=True)
class Interval:
    """When something is due: after every `steps` steps, at the end of an epoch, or never."""

    strategy: str
    steps: int

    @classmethod
    def of(cls, args: TrainingArguments, name: str, total: int) -> Interval:
        """Return the interval of `logging` or `eval` from its two fields."""
        strategy = getattr(args, f"{name}_strategy").value
        return cls(strategy, interval(getattr(args, f"{name}_steps") or 0, total) if strategy == "steps" else 0)

    def due(self, step: Step) -> bool:
        """Return whether it is due after this step."""
        return step.ends_epoch if self.strategy == "epoch" else self.strategy == "steps" and step.every(self.steps)


def build_optimizer(model: torch.nn.Module, args: TrainingArguments) -> torch.optim.Optimizer:
    """Return the optimizer of the Trainer: weight decay for all parameters but biases and norms."""
    decaying = set(get_parameter_names(model, [torch.nn.LayerNorm], list(NO_DECAY)))
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in trained if name in decaying], "weight_decay": args.weight_decay},
        {"params": [p for name, p in trained if name not in decaying], "weight_decay": 0.0},
    ]
    name, rate = OptimizerNames(args.optim).value, args.learning_rate
    if name.startswith("adamw"):
        betas = args.adam_beta1, args.adam_beta2
        return torch.optim.AdamW(groups, rate, betas, args.adam_epsilon, fused=name == "adamw_torch_fused" or None)
    return PLAIN[name](groups, lr=rate)


def _refuse(run: Run[Any], model: Any) -> None:
    placed = run.context.models.modules
    if not any(each is model for each in placed):
        raise LoopError(
            f"train got a {type(model).__name__} that is not placed.",
            f"{plural(len(placed), 'model was', 'models were')} placed.",
            "model = PretrainedWeights(FOLDER).place(run), or run.place(lambda: AutoModelForCausalLM.from_config(c))",
        )
    if run.context.mesh.context.size > 1:
        raise LoopError(
            "train cannot divide sequences over processes.",
            f"parallel.context={run.context.mesh.context.size}, and a model of transformers shifts its labels itself.",
            "--set parallel.context=1, or parallel.tensor for long sequences.",
        )


def _write(run: Run[Any], model: Any, args: TrainingArguments, tokenizer: Any) -> None:
    """Write the trained model to output_dir."""
    if reason := problem_of(model):
        run.print(f"{args.output_dir} is not written: {reason}. Next: unisono export RUN FOLDER --format hf")
        return
    save_pretrained(run, model, str(args.output_dir), tokenizer)
    run.print(f"The model is in {args.output_dir}.")


def _labels_of(model: torch.nn.Module, batch: Mapping[str, Any]) -> Any:
    labels = batch.get("labels")
    if labels is None:
        raise LoopError(
            "compute_metrics needs labels.",
            f"A batch of the evaluation has {', '.join(batch)}.",
            "add labels to eval_dataset, or leave compute_metrics out.",
        )
    return labels


def _numpy(value: Any) -> Any:
    with contextlib.suppress(AttributeError):
        return value.numpy()
    return tuple(_numpy(each) for each in value)
