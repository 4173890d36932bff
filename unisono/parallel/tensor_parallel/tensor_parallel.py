"""Tensor parallelism: divide every matrix over the processes of an axis, each of which computes with its own part.

A first matrix is divided by columns and a second one by rows. Between them each process has its part of the features,
heads of attention say, and only the second one's results are added up (Shoeybi et al., Megatron-LM, arXiv 1909.08053).
With two processes:

    x --> [ A0 | A1 ] --> each process its half of the features --> [ B0 ] --> x B   is the sum of both
                                                                    [ B1 ]

torch does it, by a plan of which module is divided in which way
(https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html). The plan is the user's, or the model's own
(Hugging Face's tp_plan), or follows from the usual names of the matrices in a transformer's block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from traceback import walk_tb
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from unisono.distributed.process_group import is_mixed_dtensor_error
from unisono.errors import LoopError
from unisono.parallel.layers import ForwardWrapper, layers_of
from unisono.parallel.tensor_parallel.adapter_plan import follow_plan
from unisono.parallel.tensor_parallel.head_check import HeadCheck

FIRST = (
    *("q_proj", "k_proj", "v_proj", "query", "key", "value", "qkv", "query_key_value"),
    *("gate", "gate_proj", "up", "up_proj", "fc1", "c_fc", "linear1", "w1", "w3"),
)
"""The usual names of a block's first matrices, which are divided by columns."""

SECOND = ("o_proj", "out_proj", "look", "down", "down_proj", "fc2", "c_proj", "linear2", "w2")
"""The usual names of its second matrices, which are divided by rows."""

STYLES = {
    "colwise": lambda: ColwiseParallel(),
    "rowwise": lambda: RowwiseParallel(),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "sequence_parallel": lambda: SequenceParallel(),
}
"""Hugging Face's names of torch's styles."""

Plan = Mapping[str, ParallelStyle]
"""The style of each module by its name, in which * stands for one part between dots."""


def apply_tensor(
    model: nn.Module, mesh: DeviceMesh, plan: Plan | None = None, *, sequence: bool = False, loss: bool = False
) -> None:
    """Divide the model's matrices. Every process has the same content before.

    Args:
        model: The model.
        mesh: The processes of the axis `tensor`.
        plan: The style of each module; None: the model's own plan, or one that follows from names.
        sequence: Between blocks, each process has a part of every sequence (Korthikanti et al., arXiv 2205.05198). Only
            in a plan that follows from names.
        loss: The logits stay divided by classes, for torch's loss_parallel. Only in a plan that follows from names.

    Raises:
        LoopError: No plan is found, or it does not fit the model.
    """
    chosen = dict(plan or _own_plan(model) or _plan_by_names(model, sequence=sequence, loss=loss))
    _check(model, chosen, mesh.size())
    ties = _ties(model)
    heads = HeadCheck(model, _divided_features(model, chosen), mesh.size())
    trained = {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
    _parallelize(model, mesh, chosen)
    for name, p in model.named_parameters(remove_duplicate=False):
        p.requires_grad_(trained[name])  # torch's SequenceParallel makes new parameters, which all train
    _restore_ties(model, ties)
    model.forward = ShardedForward(model, heads)


def _parallelize(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Apply torch's styles. A style refuses an unsupported module only when it gets there."""
    try:
        parallelize_module(model, mesh, dict(plan), src_data_rank=None)  # each process cuts its part out of its copy
    except NotImplementedError as error:
        raise LoopError(
            f"torch cannot apply the plan of a {type(model).__name__}.",
            f"A style does not support its module: {error}",
            "ColwiseParallel and RowwiseParallel for nn.Linear and nn.Embedding, SequenceParallel for norms; leave out "
            "modules that are to stay whole.",
        ) from error


class ShardedForward(ForwardWrapper):
    """Run the forward of a model with divided matrices.

    torch computes with divided and whole tensors together only within the modules that a plan names. An operation
    elsewhere raises an error, which this replaces by one that names the module and the line.
    """

    def __init__(self, module: nn.Module, heads: HeadCheck) -> None:
        super().__init__(module)
        self.heads = heads

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.heads.check(args, kwargs)
        try:
            return self.forward(*args, **kwargs)
        except RuntimeError as error:
            if not is_mixed_dtensor_error(error):
                raise  # the script's own error
            name, line = self._location_of(error)
            raise LoopError(
                f"{name} combines a divided tensor and a whole one (parallel.tensor).",
                f"It is in a {type(self.module).__name__} ({str(error).split()[0]}, {line}). This happens where a "
                "parameter or buffer outside of a module meets a part of a sequence, or a divided matrix is used "
                "outside of the call of its module.",
                "--set parallel.sequence_parallel=false; or put what is whole into a module, such as an nn.Embedding "
                "for positions, and with a plan of your own name that module in it.",
            ) from error

    def _location_of(self, error: BaseException) -> tuple[str, str]:
        """Return the innermost module of the model whose own forward raised the error, and the line."""
        names = {id(part): name for name, part in self.module.named_modules()}
        found, line = "The model", ""
        for frame, number in walk_tb(error.__traceback__):
            part = frame.f_locals.get("".join(frame.f_code.co_varnames[:1]))  # mostly called self
            if isinstance(part, nn.Module) and id(part) in names and frame.f_code.co_name == "forward":
                found = names[id(part)] or "The model"
                line = f"{Path(frame.f_code.co_filename).name}, line {number}"
        return found, line


def _own_plan(model: nn.Module) -> Plan:
    """Return the plan that a Hugging Face model has."""
    words: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    unknown = sorted(set(words.values()) - set(STYLES))
    if unknown:
        raise LoopError(
            f"The tensor-parallel plan of {type(model).__name__} has unknown styles.",
            f"Its tp_plan names {', '.join(unknown)}, which torch does not have.",
            "run.place(model, plan={name: style, ...}) with styles of torch.distributed.tensor.parallel.",
        )
    return follow_plan(model, {name: STYLES[word]() for name, word in words.items()})


def _plan_by_names(model: nn.Module, *, sequence: bool, loss: bool) -> Plan:
    """Return a plan for blocks whose matrices have usual names, and for the embedding and the head around them."""
    names = {id(part): name for name, part in model.named_modules()}
    blocks = [part for part in layers_of(model) if any(isinstance(p, nn.Linear) for p in part.modules())]
    plan: dict[str, ParallelStyle] = {}
    between = Shard(1) if sequence else Replicate()
    whole = _inside_multi_head_attention(model, sequence=sequence)
    for block in blocks:
        for name, part in block.named_modules(prefix=names[id(block)]):
            if part in whole:
                continue
            if isinstance(part, nn.Linear):
                plan[name] = _style_by_name(model, name, between)
            elif sequence and isinstance(part, nn.LayerNorm | nn.RMSNorm):
                plan[name] = SequenceParallel(use_local_output=False)
    if not plan:
        raise LoopError(
            f"No tensor-parallel plan was found for a {type(model).__name__}.",
            "It has no plan of its own, and no blocks in a row with matrices in them.",
            "run.place(model, plan={'blocks.*.up': ColwiseParallel(), 'blocks.*.down': RowwiseParallel()}), with names "
            "of its own and styles of torch.distributed.tensor.parallel.",
        )
    for name, part in model.named_modules():
        if any(part is inner for block in blocks for inner in block.modules()):
            continue
        if isinstance(part, nn.Embedding):
            plan[name] = RowwiseParallel(
                input_layouts=Replicate(), output_layouts=between, use_local_output=not sequence
            )
        elif isinstance(part, nn.Linear):
            plan[name] = ColwiseParallel(
                input_layouts=between, output_layouts=Shard(-1) if loss else Replicate(), use_local_output=not loss
            )
        elif sequence and isinstance(part, nn.LayerNorm | nn.RMSNorm):
            plan[name] = SequenceParallel(use_local_output=False)
    return plan


def _inside_multi_head_attention(model: nn.Module, *, sequence: bool) -> set[nn.Module]:
    """Return the modules within an nn.MultiheadAttention, which stay whole.

    It computes with their matrices itself, so the hooks of a style would not be called; it also needs whole sequences.
    """
    found = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.MultiheadAttention)]
    if found and sequence:
        raise LoopError(
            f"A {type(model).__name__} does not work with parallel.sequence_parallel.",
            f"{found[0][0]} is an nn.MultiheadAttention, which computes with its matrices itself and needs whole "
            "sequences.",
            "--set parallel.sequence_parallel=false, or an attention of nn.Linear and F.scaled_dot_product_attention.",
        )
    return {inner for _, part in found for inner in part.modules()}


def _style_by_name(model: nn.Module, name: str, between: Any) -> ParallelStyle:
    word = name.rpartition(".")[2]
    if word in FIRST:
        return ColwiseParallel(input_layouts=between)
    if word in SECOND:
        # a part of a sequence stays a DTensor, which knows the whole length: it may not divide evenly
        return RowwiseParallel(output_layouts=between, use_local_output=not between.is_shard())
    raise LoopError(
        f"No tensor-parallel plan was found for a {type(model).__name__}.",
        f"It has no plan of its own, and the name of {name} does not show whether it comes first or second in its "
        f"block: {', '.join(FIRST)} come first, {', '.join(SECOND)} second.",
        f"run.place(model, plan={{'{name}': ColwiseParallel(), ...}}) with a style for every matrix, or rename it.",
    )


def _styled_modules(model: nn.Module, plan: Plan) -> Iterator[tuple[str, nn.Module, ParallelStyle]]:
    """Yield every module that the plan names, with its style."""
    for name, part in model.named_modules():
        for pattern, style in plan.items():
            if name.count(".") == pattern.count(".") and fnmatchcase(name, pattern):
                yield name, part, style


def _divided_features(model: nn.Module, plan: Plan) -> Iterator[tuple[str, int]]:
    """Yield the matrices between which features are divided, each with the dim of its weight that is divided.

    Yield none for a plan with other styles too, which may gather what these divide.
    """
    if any(not isinstance(style, ColwiseParallel | RowwiseParallel | SequenceParallel) for style in plan.values()):
        return
    for name, part, style in _styled_modules(model, plan):
        if isinstance(part, nn.Linear):
            if isinstance(style, ColwiseParallel) and style.output_layouts == (Shard(-1),) and style.use_local_output:
                yield name, 0
            elif isinstance(style, RowwiseParallel) and style.input_layouts == (Shard(-1),):
                yield name, 1


def _check(model: nn.Module, plan: Plan, size: int) -> None:
    """Raise LoopError for a plan that does not fit the model, or matrices that do not divide evenly."""
    given: Mapping[str, object] = plan
    no_styles = [f"{name!r}: {style!r}" for name, style in given.items() if not isinstance(style, ParallelStyle)]
    if no_styles:
        raise LoopError(
            f"The plan of a {type(model).__name__} has values that are no styles.",
            f"It has {', '.join(no_styles)}, which is no style of torch's.",
            "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel; a style is an object: "
            "RowwiseParallel().",
        )
    styled = list(_styled_modules(model, plan))
    missing = [pattern for pattern in plan if not any(style is plan[pattern] for _, _, style in styled)]
    if missing:
        raise LoopError(
            f"The plan of a {type(model).__name__} names modules that it does not have.",
            f"It has no module called {' or '.join(missing)}.",
            f"use names of its own, such as {', '.join(name for name, _ in list(model.named_modules())[1:4])}.",
        )
    for name, part, style in styled:
        weight = getattr(part, "weight", None)
        if weight is None or isinstance(style, SequenceParallel):
            continue
        by_rows = isinstance(style, RowwiseParallel) and not isinstance(part, nn.Embedding)
        features = weight.shape[1 if by_rows else 0]
        if features % size:
            what = "inputs" if by_rows else "outputs"
            raise LoopError(
                f"A {type(model).__name__} cannot be divided with parallel.tensor={size}: {name} does not divide.",
                f"{name} has {features} {what}, which {size} processes cannot share evenly.",
                f"--set parallel.tensor={max(n for n in range(1, size) if features % n == 0)}, or another width.",
            )


def _ties(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the slots of each parameter that several modules share."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in model.modules():
        for name, p in part.named_parameters(recurse=False):
            holders.setdefault(id(p), []).append((part, name))
    return [slots for slots in holders.values() if len(slots) > 1]


def _restore_ties(model: nn.Module, ties: list[list[tuple[nn.Module, str]]]) -> None:
    """Let modules share parameters again: dividing has made one for each of them."""
    for (first, name), *others in ties:
        kept = getattr(first, name)
        for other, other_name in others:
            replaced = getattr(other, other_name)
            if getattr(replaced, "placements", None) != getattr(kept, "placements", None):
                raise LoopError(
                    f"The plan of a {type(model).__name__} divides a shared parameter in two ways.",
                    f"A {type(first).__name__} and a {type(other).__name__} share a parameter of shape "
                    f"{tuple(kept.shape)}, and the plan divides it in two ways.",
                    "give them styles that divide it in the same way, or do not tie them.",
                )
            setattr(other, other_name, kept)
