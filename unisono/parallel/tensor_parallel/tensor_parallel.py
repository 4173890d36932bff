"""Tensor parallel: every matrix lies over the processes of an axis, which all compute with their own part of it.

A first matrix is cut by columns and a second one by rows, so that between them each process has its part of the
features, heads of attention say, and only the second one's results have to be added up (Shoeybi et al., Megatron-LM,
arXiv 1909.08053). With two processes:

    x --> [ A0 | A1 ] --> each its half of the features --> [ B0 ] --> x B   is the sum of both
                                                            [ B1 ]

torch does it, by a plan of which module is cut how
(https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html). The plan is the user's, or the model's own
(Hugging Face's tp_plan), or found by the names that people give the matrices of a transformer's block.
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
from unisono.parallel.tensor_parallel.head_check import HeadCheck

FIRST = (
    *("q_proj", "k_proj", "v_proj", "query", "key", "value", "qkv", "query_key_value"),
    *("gate", "gate_proj", "up", "up_proj", "fc1", "c_fc", "linear1", "w1", "w3"),
)
"""What people call the matrices of a block that come first: cut by columns."""

SECOND = ("o_proj", "out_proj", "look", "down", "down_proj", "fc2", "c_proj", "linear2", "w2")
"""And those that bring the features together again: cut by rows."""

STYLES = {
    "colwise": lambda: ColwiseParallel(),
    "rowwise": lambda: RowwiseParallel(),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "sequence_parallel": lambda: SequenceParallel(),
}
"""Hugging Face's words for torch's styles."""

Plan = Mapping[str, ParallelStyle]
"""Names of modules, in which * stands for one part between dots, and how each is cut."""


def apply_tensor(
    model: nn.Module, mesh: DeviceMesh, plan: Plan | None = None, *, sequence: bool = False, loss: bool = False
) -> None:
    """Cut the model's matrices. Every process has the same content before.

    plan      None: the model's own, or found
    sequence  between blocks each process has a part of every sequence instead of all of it (Korthikanti et al.,
              arXiv 2205.05198); of a found plan
    loss      the logits stay cut by classes, for torch's loss_parallel; of a found plan

    Raises LoopError where no plan is found, or where it does not fit.
    """
    chosen = dict(plan or _models_own(model) or _found(model, sequence=sequence, loss=loss))
    _check(model, chosen, mesh.size())
    ties = _ties(model)
    heads = HeadCheck(model, _divided(model, chosen), mesh.size())
    trained = {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
    _parallelize(model, mesh, chosen)
    for name, p in model.named_parameters(remove_duplicate=False):
        p.requires_grad_(trained[name])  # torch's SequenceParallel makes parameters anew, and all of those train
    _tie_again(model, ties)
    model.forward = ShardedForward(model, heads)


def _parallelize(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """torch's own, which tells of a style that does not know a module only when it comes there."""
    try:
        parallelize_module(model, mesh, dict(plan))
    except NotImplementedError as error:
        raise LoopError(
            f"A plan was given for a {type(model).__name__}.",
            f"torch cannot follow it: {error}",
            "ColwiseParallel and RowwiseParallel for nn.Linear and nn.Embedding, SequenceParallel for norms; leave out "
            "what is to stay whole.",
        ) from error


class ShardedForward(ForwardWrapper):
    """A forward in which some matrices are parts of themselves. torch computes with these beside whole tensors only
    within the modules that a plan names; an operation elsewhere that meets both ends in an error that says which."""

    def __init__(self, module: nn.Module, heads: HeadCheck) -> None:
        super().__init__(module)
        self.heads = heads

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.heads.check(args, kwargs)
        try:
            return self.forward(*args, **kwargs)
        except RuntimeError as error:
            if not is_mixed_dtensor_error(error):
                raise  # a script's own
            where, line = self._place_of(error)
            raise LoopError(
                f"{where} was called, in a {type(self.module).__name__} whose matrices are divided (parallel.tensor).",
                f"Its forward pass has an operation between a divided tensor and a whole one ({str(error).split()[0]}, "
                f"{line}): a parameter or buffer by itself beside part of a sequence, for instance, or a divided "
                "matrix outside of the call of its module.",
                "--set parallel.sequence_parallel=false; or put what is whole into a module, such as an nn.Embedding "
                "for "
                "positions, and with a plan of your own name that module in it.",
            ) from error

    def _place_of(self, error: BaseException) -> tuple[str, str]:
        """The innermost module of the model in whose own code it happened, and the line."""
        names = {id(part): name for name, part in self.module.named_modules()}
        where, line = "The model", ""
        for frame, number in walk_tb(error.__traceback__):
            part = frame.f_locals.get("".join(frame.f_code.co_varnames[:1]))  # "self", for most people
            if isinstance(part, nn.Module) and id(part) in names and frame.f_code.co_name == "forward":
                where = names[id(part)] or "The model"
                line = f"{Path(frame.f_code.co_filename).name}, line {number}"
        return where, line


def _models_own(model: nn.Module) -> Plan:
    """The plan that a model of Hugging Face's brings along."""
    words: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    strange = sorted(set(words.values()) - set(STYLES))
    if strange:
        raise LoopError(
            f"The own plan of {type(model).__name__} was to be used for parallel.tensor.",
            f"It says {', '.join(strange)}, for which torch has no style.",
            "run.place(model, plan={name: style, ...}) with styles of torch.distributed.tensor.parallel.",
        )
    return {name: STYLES[word]() for name, word in words.items()}


def _found(model: nn.Module, *, sequence: bool, loss: bool) -> Plan:
    """A plan for blocks whose matrices have names that we know, and for the embedding and the head around them."""
    names = {id(part): name for name, part in model.named_modules()}
    blocks = [part for part in layers_of(model) if any(isinstance(p, nn.Linear) for p in part.modules())]
    plan: dict[str, ParallelStyle] = {}
    spread = Shard(1) if sequence else Replicate()
    alone = _on_their_own(model, sequence=sequence)
    for block in blocks:
        for name, part in block.named_modules(prefix=names[id(block)]):
            if part in alone:
                continue
            if isinstance(part, nn.Linear):
                plan[name] = _style(model, name, spread)
            elif sequence and isinstance(part, nn.LayerNorm | nn.RMSNorm):
                plan[name] = SequenceParallel(use_local_output=False)
    if not plan:
        raise LoopError(
            f"parallel.tensor was asked for a {type(model).__name__}.",
            "It has no plan of its own, and no blocks in a row with matrices in them were found.",
            "run.place(model, plan={'blocks.*.up': ColwiseParallel(), 'blocks.*.down': RowwiseParallel()}), with names "
            "of its own and styles of torch.distributed.tensor.parallel.",
        )
    for name, part in model.named_modules():
        if any(part is inner for block in blocks for inner in block.modules()):
            continue
        if isinstance(part, nn.Embedding):
            plan[name] = RowwiseParallel(
                input_layouts=Replicate(), output_layouts=spread, use_local_output=not sequence
            )
        elif isinstance(part, nn.Linear):
            plan[name] = ColwiseParallel(
                input_layouts=spread, output_layouts=Shard(-1) if loss else Replicate(), use_local_output=not loss
            )
        elif sequence and isinstance(part, nn.LayerNorm | nn.RMSNorm):
            plan[name] = SequenceParallel(use_local_output=False)
    return plan


def _on_their_own(model: nn.Module, *, sequence: bool) -> set[nn.Module]:
    """What is within an nn.MultiheadAttention. That takes the matrices and computes with them itself, so no hook of a
    style would be called: it stays whole, and every process computes it. It also wants whole sequences."""
    found = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.MultiheadAttention)]
    if found and sequence:
        raise LoopError(
            f"parallel.sequence_parallel was asked for a {type(model).__name__}.",
            f"{found[0][0]} is an nn.MultiheadAttention, which computes with its matrices itself and knows no parts of "
            "sequences.",
            "--set parallel.sequence_parallel=false, or an attention of nn.Linear and F.scaled_dot_product_attention.",
        )
    return {inner for _, part in found for inner in part.modules()}


def _style(model: nn.Module, name: str, spread: Any) -> ParallelStyle:
    word = name.rpartition(".")[2]
    if word in FIRST:
        return ColwiseParallel(input_layouts=spread)
    if word in SECOND:
        # a part of a sequence stays a DTensor, which knows how long the whole is: it may not divide evenly
        return RowwiseParallel(output_layouts=spread, use_local_output=not spread.is_shard())
    raise LoopError(
        f"parallel.tensor was asked for a {type(model).__name__}.",
        f"It has no plan of its own, and whether {name} comes first or second in its block does not show in its name: "
        f"{', '.join(FIRST)} come first, {', '.join(SECOND)} second.",
        f"run.place(model, plan={{'{name}': ColwiseParallel(), ...}}) with a style for every matrix, or rename it.",
    )


def _cut(model: nn.Module, plan: Plan) -> Iterator[tuple[str, nn.Module, ParallelStyle]]:
    """Every module that the plan names, with its style."""
    for name, part in model.named_modules():
        for pattern, style in plan.items():
            if name.count(".") == pattern.count(".") and fnmatchcase(name, pattern):
                yield name, part, style


def _divided(model: nn.Module, plan: Plan) -> Iterator[tuple[str, int]]:
    """The matrices between which features are divided, each with the dim of its weight that is. None where a plan has
    other styles too, which may put together in between what these divide."""
    if any(not isinstance(style, ColwiseParallel | RowwiseParallel | SequenceParallel) for style in plan.values()):
        return
    for name, part, style in _cut(model, plan):
        if isinstance(part, nn.Linear):
            if isinstance(style, ColwiseParallel) and style.output_layouts == (Shard(-1),) and style.use_local_output:
                yield name, 0
            elif isinstance(style, RowwiseParallel) and style.input_layouts == (Shard(-1),):
                yield name, 1


def _check(model: nn.Module, plan: Plan, size: int) -> None:
    """Can everything be cut into equal parts?"""
    given: Mapping[str, object] = plan
    strange = [f"{name!r}: {style!r}" for name, style in given.items() if not isinstance(style, ParallelStyle)]
    if strange:
        raise LoopError(
            f"A plan was given for a {type(model).__name__}.",
            f"In it is {', '.join(strange)}, which is no style of torch's.",
            "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel; a style is an object: "
            "RowwiseParallel().",
        )
    named = list(_cut(model, plan))
    missing = [pattern for pattern in plan if not any(style is plan[pattern] for _, _, style in named)]
    if missing:
        raise LoopError(
            f"A plan was given for a {type(model).__name__}.",
            f"It has no module called {' or '.join(missing)}.",
            f"use names of its own, such as {', '.join(name for name, _ in list(model.named_modules())[1:4])}.",
        )
    for name, part, style in named:
        weight = getattr(part, "weight", None)
        if weight is None or isinstance(style, SequenceParallel):
            continue
        by_rows = isinstance(style, RowwiseParallel) and not isinstance(part, nn.Embedding)
        features = weight.shape[1 if by_rows else 0]
        if features % size:
            what = "inputs" if by_rows else "outputs"
            raise LoopError(
                f"parallel.tensor={size} was asked for a {type(model).__name__}.",
                f"{name} has {features} {what}, which {size} processes cannot share evenly.",
                f"--set parallel.tensor={max(n for n in range(1, size) if features % n == 0)}, or another width.",
            )


def _ties(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Parameters that several modules share: who holds each, under which name."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in model.modules():
        for name, p in part.named_parameters(recurse=False):
            holders.setdefault(id(p), []).append((part, name))
    return [held for held in holders.values() if len(held) > 1]


def _tie_again(model: nn.Module, ties: list[list[tuple[nn.Module, str]]]) -> None:
    """Cutting made a parameter of its own for each of them."""
    for (first, name), *others in ties:
        kept = getattr(first, name)
        for other, its_name in others:
            mine = getattr(other, its_name)
            if getattr(mine, "placements", None) != getattr(kept, "placements", None):
                raise LoopError(
                    f"parallel.tensor was asked for a {type(model).__name__}.",
                    f"A {type(first).__name__} and a {type(other).__name__} share a parameter of shape "
                    f"{tuple(kept.shape)}, and the plan cuts it in two ways.",
                    "give them styles that cut it alike, or do not tie them.",
                )
            setattr(other, its_name, kept)
