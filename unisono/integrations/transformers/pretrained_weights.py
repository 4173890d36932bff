"""A pretrained model of transformers under every placement: each process reads only its part of the safetensors files.

    config.json                        model.safetensors, or model.safetensors.index.json and its files
        |                                   |
    build(): the architecture,         values_for(model): which tensor of which file is which parameter
    without content                         |
        `------------ run.place ------------+---> divided first, then filled: rows, columns, stages of this process

What `from_pretrained` does around the files is done here with functions of transformers: names of older checkpoints,
the prefix of a base model, tied weights, weights that the files lack (the head of a new task, say).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, initialization
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key
from transformers.utils.loading_report import LoadStateDictInfo

from unisono.checkpoint.safetensors_reader import ONE_FILE, LazyTensor, has_tensor_files, tensors_in
from unisono.config import plural
from unisono.errors import CheckpointError
from unisono.train.run import Run

Wrap = Callable[[Any], torch.nn.Module]
"""A function of the model, such as peft's get_peft_model."""

MOST_NAMES = 4
"""Names in a message."""

PIECE = 2**22
"""Elements of a tensor that are compared at once."""


@dataclass
class LoadReport:
    """Names that do not match between a model and its files.

    Attributes:
        missing: Parameters and buffers that the files lack. They have initial values.
        unexpected: Tensors of the files that the model has no place for.
        tied: Names of the model that share the tensor of another name, as {name: other name}.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return a line for the user on each kind of mismatch."""
        found = []
        if self.missing:
            found.append(f"new, because the files do not have them: {_some(self.missing)}")
        if self.unexpected:
            found.append(f"not used, because the model does not have them: {_some(self.unexpected)}")
        return found


class PretrainedWeights:
    """The architecture and the weights of a folder that `save_pretrained` or a download has written.

    Args:
        folder: A folder with config.json, and model.safetensors or model.safetensors.index.json.
        kind: A class of transformers: an AutoModel for a task, or a class of models.
        dtype: The dtype of parameters: "auto" is that of the files.
        changes: Changes of the configuration, such as num_labels=3.

    Attributes:
        report: Names that do not match, after `build`.

    Raises:
        CheckpointError: The folder has no weights in safetensors files, or they are quantized.
    """

    def __init__(
        self,
        folder: str | Path,
        kind: Any = AutoModelForCausalLM,
        *,
        dtype: str | torch.dtype = "auto",
        **changes: Any,
    ) -> None:
        self.folder, self.kind = Path(folder).expanduser(), kind
        if not has_tensor_files(self.folder):
            there = sorted(path.name for path in self.folder.glob("*"))[:MOST_NAMES]
            raise CheckpointError(
                f"There are no weights in {self.folder}.",
                f"It has no {ONE_FILE} and no index of several files. It holds {', '.join(there) or 'nothing'}.",
                f"hf download NAME --local-dir {self.folder}; files of another kind: model.save_pretrained(FOLDER).",
            )
        self.config = AutoConfig.from_pretrained(self.folder, **changes)
        self.config.name_or_path = str(self.folder)
        if getattr(self.config, "quantization_config", None) is not None:
            raise CheckpointError(
                f"Cannot read the weights in {self.folder} in parts: they are quantized.",
                "config.json has a quantization_config.",
                "run.place(lambda: AutoModelForCausalLM.from_pretrained(FOLDER)), or weights in floating point.",
            )
        self._files = tensors_in(self.folder)
        self._dtype = self._dtype_of(dtype)
        self.report = LoadReport()
        self._filled: dict[int, tuple[torch.Tensor, int, LazyTensor]] = {}
        self._copies: dict[int, tuple[torch.Tensor, LazyTensor]] = {}

    def place(self, run: Run[Any], *, wrap: Wrap | None = None, **more: Any) -> torch.nn.Module:
        """Place the model: build it, divide it, and read the part of this process. Print names that do not match.

        Args:
            run: The run.
            wrap: A function of the built model, whose weights are not read yet: peft's get_peft_model, say.
            more: Further arguments of `run.place`.
        """
        model = run.place(lambda: self.build(wrap), weights=self, **more)
        for line in self.report.lines():
            run.print(f"{self.folder}: {line}")
        return model

    def build(self, wrap: Wrap | None = None) -> torch.nn.Module:
        """Build the model. Parameters that the files have are without content; others have initial values.

        Args:
            wrap: A function of the model, which must not use these parameters.

        Raises:
            CheckpointError: Shapes differ, or `wrap` uses a parameter.
        """
        memory: Any = torch.utils.deterministic  # a module with a property
        filling, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, False
        try:
            with ExitStack() as kept:
                kept.enter_context(initialization.no_init_weights())
                kept.enter_context(initialization.no_tie_weights())
                model = self._constructed()
        finally:
            memory.fill_uninitialized_memory = filling
        self._assign(model)
        if model.can_generate() and (self.folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(self.folder)
        if wrap is None:
            return model
        with RefuseReads({address_of(tensor): value for tensor, _, value in self._filled.values()}) as reads:
            wrapped = wrap(model)
        self._copies = reads.copies
        return wrapped

    def values_for(self, module: torch.nn.Module) -> Mapping[str, LazyTensor]:
        """Return the tensors of the files by the names of a model that `build` has returned.

        Raises:
            CheckpointError: Parameters were changed since then, so their content would be lost.
        """
        own, found = module.state_dict(keep_vars=True), dict[str, LazyTensor]()
        for name, tensor in own.items():
            if id(tensor) in self._filled:
                found[name] = self._filled[id(tensor)][2]
            elif self._copies and address_of(tensor) in self._copies:
                found[name] = self._copies[address_of(tensor)][1]
        lost = [name for name, tensor in own.items() if id(tensor) in self._filled and self._was_changed(tensor)]
        if lost or not found:
            raise CheckpointError(
                f"Cannot load the weights in {self.folder} into a {type(module).__name__}.",
                f"{lost[0]} was changed after the model was built." if lost else "It was built by other code.",
                "run.place(lambda: weights.build(), weights=weights), and change weights after it.",
            )
        return found

    def _was_changed(self, tensor: torch.Tensor) -> bool:
        kept, version, _ = self._filled[id(tensor)]
        return kept is not tensor or tensor._version != version  # noqa: SLF001  (it has no public name)

    def _dtype_of(self, dtype: str | torch.dtype) -> torch.dtype:
        """Return the dtype of parameters, as `from_pretrained` chooses it."""
        if dtype == "auto":
            dtype = self.config.dtype or next(
                (each.dtype for each in self._files.values() if each.dtype.is_floating_point), torch.float32
            )
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def _constructed(self) -> Any:
        build = getattr(self.kind, "from_config", None) or self.kind._from_config  # noqa: SLF001  (an AutoModel's too)
        model = build(self.config, dtype=self._dtype)
        strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
        for name, p in model.named_parameters():
            if set(strict) & set(name.split(".")) and p.dtype != torch.float32:
                p.data = torch.empty_like(p, dtype=torch.float32)
        return model

    def _assign(self, model: Any) -> None:
        """Find out which tensor of the files is which of the model, initialize the others, and tie weights."""
        own = model.state_dict(keep_vars=True)
        found, unexpected = self._named(model, own)
        shapes = [
            f"{name} {list(found[name].shape)} instead of {list(own[name].shape)}"
            for name in found
            if found[name].shape != own[name].shape
        ]
        if shapes:
            raise CheckpointError(
                f"The weights in {self.folder} do not fit a {type(model).__name__}.",
                f"Of another shape: {_some(shapes)}.",
                "change the configuration back, or take a class without this layer.",
            )
        self._drop_equal_ties(model, found)
        info = LoadStateDictInfo(
            missing_keys=set(own) - set(found),
            unexpected_keys=unexpected,
            mismatched_keys=set(),
            error_msgs=[],
            conversion_errors={},
            skipped_pp_keys=set(),
        )
        for name in found:
            setattr(own[name], "_is_hf_initialized", True)  # noqa: B010
        model.mark_tied_weights_as_initialized(info)
        model.initialize_weights()
        model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
        model._adjust_missing_and_unexpected_keys(info)  # noqa: SLF001  (as from_pretrained does)
        tied = dict(model.all_tied_weights_keys)
        self._filled, by_id = {}, {id(own[name]): value for name, value in found.items()}
        for name, tensor in model.state_dict(keep_vars=True).items():
            value = found.get(name) if name in found else by_id.get(id(tensor))
            if value is not None:
                self._filled[id(tensor)] = tensor, tensor._version, value  # noqa: SLF001  (it has no public name)
        self.report = LoadReport(sorted(info.missing_keys), sorted(info.unexpected_keys), tied)

    def _named(self, model: Any, own: Mapping[str, torch.Tensor]) -> tuple[dict[str, LazyTensor], set[str]]:
        """Return the tensors of the files by the names of the model, and names that it does not have."""
        transforms = get_model_conversion_mapping(model)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters: list[Any] = [each for each in transforms if not isinstance(each, WeightRenaming)]
        found, unexpected = dict[str, LazyTensor](), set[str]()
        prefix, known = model.base_model_prefix, dict(own)
        for name in sorted(self._files, key=dot_natural_key):
            renamed, converter = rename_source_key(name, renamings, converters, prefix, known)
            if renamed not in own and name in own:  # of a newer format already
                renamed, converter = rename_source_key(name, [], [], prefix, known)
            if converter is not None:
                raise CheckpointError(
                    f"Cannot read the weights in {self.folder} in parts: some are converted while they are loaded.",
                    f"{name} becomes a part of {renamed} in a {type(model).__name__}.",
                    "run.place(lambda: AutoModelForCausalLM.from_pretrained(FOLDER)) reads them on each process.",
                )
            if renamed in own:
                found[renamed] = self._files[name]
            else:
                unexpected.add(renamed)
        return found, unexpected

    def _drop_equal_ties(self, model: Any, found: dict[str, LazyTensor]) -> None:
        """Keep one of two tied weights that the files both have; if they differ, they are not tied."""
        for target, source in list(model.all_tied_weights_keys.items()):
            if target in found and source in found:
                if _equal(found[target], found[source]):
                    del found[target]
                else:
                    del model.all_tied_weights_keys[target]


class RefuseReads(TorchDispatchMode):
    """Refuse operators that use parameters without content, or change them. Views and tensors like them are allowed.

    Copies are allowed, too: a deep copy of a layer, which peft trains beside the layer, gets the same content later.

    Args:
        values: The values of these parameters, by the address of their memory.

    Attributes:
        copies: Tensors that are copies of them, with their values, by address.
    """

    def __init__(self, values: Mapping[int, LazyTensor]) -> None:
        super().__init__()
        self.copies: dict[int, tuple[torch.Tensor, LazyTensor]] = {}
        self._values = {address: value for address, value in values.items() if address}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema  # noqa: SLF001  (it has no public name)
        views = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
        if views or "_like" in schema.name or "::new_" in schema.name:
            return func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        used = next((leaf for leaf in leaves if address_of(leaf) in self._values), None)
        if used is None:
            return func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.clone.default or used.untyped_storage().nbytes() != used.nbytes:
            raise CheckpointError(
                "A function that wraps a pretrained model uses its weights, which are not read yet.",
                f"It calls {schema.name} with a weight of shape {list(used.shape)}.",
                "wrap=None, and initialize from the weights after run.place; LoRA: init_lora_weights=True.",
            )
        copy = func(*args, **(kwargs or {}))
        value = self._values[address_of(used)]
        self._values[address_of(copy)] = value
        self.copies[address_of(copy)] = copy, value
        return copy


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the memory of a tensor; 0 if it has none: an empty or a fake one."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):
        return 0


def _equal(one: LazyTensor, other: LazyTensor) -> bool:
    """Return whether two tensors of files have the same content. Reads them in pieces."""
    if one.shape != other.shape or one.dtype != other.dtype or not one.shape:
        return False
    rows, *rest = one.shape
    step = max(1, PIECE // max(1, torch.Size(rest).numel()))
    return all(
        torch.equal(one.box(*box), other.box(*box))
        for first in range(0, rows, step)
        for box in [([first, *(0 for _ in rest)], [min(step, rows - first), *rest])]
    )


def _some(names: list[str]) -> str:
    more = f" and {plural(len(names) - MOST_NAMES, 'other')}" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
