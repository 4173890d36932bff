"""Write a model as a program: one function for each format of formats.py."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.utils._pytree import tree_leaves, tree_map

from unisono.errors import LoopError
from unisono.export.adapters import has_adapter, merge_adapter, require_transformer, write_adapter
from unisono.export.formats import ADAPTER, FORMATS, PROGRAMS, WEIGHTS, ExportRequest
from unisono.export.gguf_file import round_weights, write_gguf
from unisono.export.quantization import (
    forget_quantized,
    is_quantized,
    quantize_linear,
    quantized_state,
    without_fake_quantizers,
    without_torchao,
)
from unisono.export.samples import (
    ModelCall,
    PlainOutputs,
    largest_relative,
    returns_its_own_class,
    write_samples,
)
from unisono.export.tokenizer_files import write_tokenizer

PROGRAM, FACTS, UNQUANTIZED = "program", "facts.json", "unquantized"
"""Names in the folder of an export: the program, without its suffix; what is known about it; the same before it was
quantized."""


def write_program(request: ExportRequest, model: torch.nn.Module, call: ModelCall, evaluates: bool) -> None:
    """Write a model in a format, with samples and facts.

    Adapters are merged into the weights, except by the format for an adapter alone.

    Args:
        request: What to write. The folder must exist. For a quantization, the unquantized model is written, too, to a
            folder in it.
        model: The model, whole and on one device. A quantization changes it, and merging does.
        call: Inputs of a call.
        evaluates: Whether the script has an evaluation.

    Raises:
        LoopError: The model cannot be exported in this format, or cannot be quantized.
    """
    folder, quantize = Path(request.folder), request.quantize
    first = folder / UNQUANTIZED if quantize else folder
    first.mkdir(exist_ok=True)
    model.eval()
    call = call.without("num_items_in_batch")  # a number that only divides the loss of a model of transformers
    call = call.twice() if call.samples() == 1 else call  # torch.export takes a size of 1 for a constant
    facts: dict[str, Any] = {
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "samples": call.samples(),
        "evaluates": evaluates,
    }
    base: Any = model.get_base_model() if has_adapter(model) else model  # type: ignore[operator]
    plain = request.format in (*PROGRAMS, WEIGHTS) and returns_its_own_class(base)
    call = call.without("labels") if plain else call
    calls = [call, call.first(call.samples() // 2)] if call.samples() >= 4 else [call]
    if has_adapter(model):
        model.float()  # weights of 16 bits would be rounded again when the adapter is merged
    if quantize:
        without_fake_quantizers(model, quantize)
    expected = write_samples(first, model, calls)
    if has_adapter(model) and request.format != ADAPTER:
        model, merged = merge_adapter(model, folder)
        facts |= merged
    bare: Any = model
    if plain:
        model = PlainOutputs(model)
        if request.format == "executorch":  # it cannot lower the layout of outputs of torch's fused attention
            bare.set_attn_implementation("eager")
    if quantize:
        _write(replace(request, quantize=""), model, call, first)
        if request.format == "gguf":
            facts |= round_weights(bare, quantize)
        else:
            facts |= quantize_linear(bare, quantize, plain=request.format != WEIGHTS)
        found = write_samples(folder, model, calls)
        facts["relative_to_unquantized"] = largest_relative(expected, found)
        facts.pop("bound", None)  # of merging, which comes before
    facts |= _write(request, model, call, folder)
    (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")


def _write(request: ExportRequest, model: torch.nn.Module, call: ModelCall, folder: Path) -> dict[str, Any]:
    """Write the program to a folder. Return what the writer knows."""
    name = request.format
    try:
        return WRITERS[name](model, call, folder / f"{PROGRAM}{FORMATS[name].suffix}", request)
    except LoopError:
        raise
    except Exception as error:  # torch raises many kinds
        raise LoopError(
            f"Cannot export the {type(_bare(model)).__name__} as {FORMATS[name].text}.",
            f"{type(error).__name__}: {_reason(error)}",
            "change the model as the reason says, or export its weights: --format safetensors",
        ) from error


def _bare(model: torch.nn.Module) -> torch.nn.Module:
    """Return a model without the wrapper for its outputs."""
    return model.model if isinstance(model, PlainOutputs) else model


def _reason(error: Exception) -> str:
    """Return the line of a message of torch that states the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    stated = [line for line in lines if line.startswith(("Explanation:", "Could not", "Constraints violated"))]
    return (stated or lines or ["no reason is given"])[0]


def _exported(model: torch.nn.Module, call: ModelCall) -> torch.export.ExportedProgram:
    """Return the graph of a model. Sizes of inputs are free wherever the model's code allows it."""

    def free(leaf: Any) -> Any:
        return dict.fromkeys(range(leaf.dim()), torch.export.Dim.AUTO) if isinstance(leaf, torch.Tensor) else None

    named = inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments
    with torch.no_grad():
        program = torch.export.export(
            model, call.args, call.kwargs, dynamic_shapes=tree_map(free, dict(named)), strict=False
        )
    return without_torchao(program) if is_quantized(model) else program


def _sizes(program: torch.export.ExportedProgram) -> dict[str, list[int | str]]:
    """Return the shape of each input: a number for a fixed size, a name and its range for a free one."""
    ranges = program.range_constraints
    wanted = set(program.graph_signature.user_inputs)
    found: dict[str, list[int | str]] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and node.name in wanted and isinstance(value, torch.Tensor):
            sizes: list[Any] = list(value.shape)  # torch states that all are int
            found[node.name] = [size if isinstance(size, int) else _named(size, ranges) for size in sizes]
    return found


def _named(size: Any, ranges: Any) -> str:
    known = ranges.get(size.node.expr)
    upper = "" if known is None or known.upper > 1 << 40 else f" to {known.upper}"
    return f"{size}" if known is None else f"{size} (from {known.lower}{upper})"


def write_torch(model: torch.nn.Module, call: ModelCall, path: Path, request: ExportRequest) -> dict[str, Any]:
    """Write a program that torch.export.load reads."""
    program = _exported(model, call)
    torch.export.save(program, path)
    return {"inputs": _sizes(program)}


def write_aoti(model: torch.nn.Module, call: ModelCall, path: Path, request: ExportRequest) -> dict[str, Any]:
    """Write compiled code that torch._inductor.aoti_load_package reads, in Python or C++."""
    from torch._inductor import aoti_compile_and_package

    program = _exported(model, call)
    aoti_compile_and_package(program, package_path=str(path))
    return {"inputs": _sizes(program)}


def write_onnx(model: torch.nn.Module, call: ModelCall, path: Path, request: ExportRequest) -> dict[str, Any]:
    """Write a model that onnxruntime reads."""
    program = _exported(model, call)
    torch.onnx.export(program, f=str(path), dynamo=True, external_data=False, verbose=False)
    return {"inputs": _sizes(program)}


def write_executorch(model: torch.nn.Module, call: ModelCall, path: Path, request: ExportRequest) -> dict[str, Any]:
    """Write a program for the runtime of ExecuTorch, with the operators of XNNPACK if it takes the model.

    The runtime plans its memory in advance, so the sizes of the example are the largest ones.
    """
    from torch.utils._sympy.value_ranges import ValueRanges

    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.contiguous()  # neither XNNPACK nor the runtime takes weights in channels_last
    for part in model.modules():
        if isinstance(part, torch.nn.EmbeddingBag):
            part.forward = partial(_bags_of_rows, part)  # type: ignore[method-assign]
    program = _exported(model, call)
    largest = _sizes_of_example(program, call)
    for symbol, known in list(program.range_constraints.items()):
        program.range_constraints[symbol] = ValueRanges(known.lower, largest.get(symbol, known.upper))
    sizes = _sizes(program)
    try:
        lowered, operators = _lowered(program, xnnpack=True), "XNNPACK"
    except Exception:  # XNNPACK refuses some layouts, and more than one free size
        lowered, operators = _lowered(program, xnnpack=False), "portable"
    if missing := _missing_operators(lowered.executorch_program):
        raise LoopError(
            f"Cannot export the {type(_bare(model)).__name__} as {FORMATS['executorch'].text}.",
            f"The runtime has no operator {', '.join(missing)}.",
            "change the model so that it does without, or choose a format that has it: --format onnx or torch",
        )
    path.write_bytes(bytes(lowered.buffer))
    return {"inputs": sizes, "operators": operators}


def _bags_of_rows(bag: torch.nn.EmbeddingBag, rows: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    """Compute sums or means of embeddings with operators that ExecuTorch has; others with the module's own operator.

    Args:
        bag: The module.
        rows: Rows of the embedding, integers [bags, entries], for the sums and means.
        others: Further arguments of the module.
        named: The same by name.

    Returns:
        The outputs of the module, [bags, width].
    """
    if rows.dim() != 2 or others or named or bag.mode == "max" or bag.max_norm is not None:
        return torch.nn.EmbeddingBag.forward(bag, rows, *others, **named)
    counted = torch.ones_like(rows, dtype=bag.weight.dtype)
    if bag.padding_idx is not None:
        counted = (rows != bag.padding_idx).to(bag.weight.dtype)
    total = (torch.nn.functional.embedding(rows, bag.weight) * counted[..., None]).sum(1)
    return total / counted.sum(1, keepdim=True).clamp(min=1) if bag.mode == "mean" else total


def _lowered(program: torch.export.ExportedProgram, *, xnnpack: bool) -> Any:
    """Return a program of ExecuTorch, with operators of XNNPACK or only its own portable ones."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`", FutureWarning)
        edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()] if xnnpack else [])
    return edge.to_executorch()


def _missing_operators(program: Any) -> list[str]:
    """Return the operators of a program of ExecuTorch that its runtime lacks. The runtime itself says only 0x14."""
    from executorch.runtime import Runtime

    known = set(Runtime.get().operator_registry.operator_names)
    needed = {
        f"{each.name}.{each.overload}" if each.overload else each.name
        for plan in program.execution_plan
        for each in plan.operators
    }
    return sorted(needed - known)


def _sizes_of_example(program: torch.export.ExportedProgram, call: ModelCall) -> dict[Any, int]:
    """Return the size that each free size has in the example."""
    inputs = [node.meta["val"] for node in program.graph.nodes if node.name in program.graph_signature.user_inputs]
    symbolic = [list[Any](each.shape) for each in inputs if isinstance(each, torch.Tensor)]
    tensors = [leaf for leaf in tree_leaves(tuple(call)) if isinstance(leaf, torch.Tensor)]
    pairs = [
        pair for shape, real in zip(symbolic, tensors, strict=True) for pair in zip(shape, real.shape, strict=True)
    ]
    return {free.node.expr: size for free, size in pairs if not isinstance(free, int)}


def write_hf(model: torch.nn.Module, call: ModelCall, path: Path, request: ExportRequest) -> dict[str, Any]:
    """Write a folder that from_pretrained reads: configuration, weights in shards, their index, and a tokenizer."""
    require_transformer(model, "hf")
    model.save_pretrained(path, max_shard_size=request.shard_size)  # type: ignore[operator]
    shards = len(list(path.glob("*.safetensors")))
    return {"shards": shards, "tokenizer": write_tokenizer(request, model, path)}


def write_peft(model: torch.nn.Module, call: ModelCall, path: Path, request: ExportRequest) -> dict[str, Any]:
    """Write a folder with an adapter alone, which peft loads onto the base model."""
    if not has_adapter(model):
        raise LoopError(
            f"Cannot export the {type(model).__name__} as {FORMATS[ADAPTER].text}.",
            "It has no adapter: it is no PeftModel.",
            "--format hf for a model of transformers, --format torch for any other model",
        )
    return write_adapter(model, path)


def write_gguf_file(model: torch.nn.Module, call: ModelCall, path: Path, request: ExportRequest) -> dict[str, Any]:
    """Write a file that llama.cpp reads."""
    return write_gguf(model, path, request)


def write_weights(model: torch.nn.Module, call: ModelCall, path: Path, request: ExportRequest) -> dict[str, Any]:
    """Write weights, and beside them the program that the fresh process fills with them."""
    tensors, metadata = quantized_state(_bare(model))
    save_file(tensors, path, metadata)
    forget_quantized(model)
    torch.export.save(_exported(model, call), path.with_name("program.pt2"))
    return {}


WRITERS: dict[str, Callable[[torch.nn.Module, ModelCall, Path, ExportRequest], dict[str, Any]]] = {
    WEIGHTS: write_weights,
    "torch": write_torch,
    "aoti": write_aoti,
    "onnx": write_onnx,
    "executorch": write_executorch,
    "hf": write_hf,
    "peft": write_peft,
    "gguf": write_gguf_file,
}
