"""Load an exported program in a fresh process, and compare its outputs with those of the model.

This file uses nothing of unisono, and for a quantized model nothing of torchao. It is run as a program,
python load_again.py FORMAT PROGRAM SAMPLES_FOLDER THREADS,
and prints one JSON object: {"difference": ..., "relative": ..., "milliseconds": ..., "megabytes": ...}.

    difference      largest absolute difference of an element, over all samples
    relative        largest norm of a difference, relative to the norm of the output
    milliseconds    median time of a call with the first samples
    megabytes       largest resident memory of this process
"""

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

Call = Callable[..., Any]

CALLS, SECONDS = 20, 5.0
"""Calls that are timed, at most for this long."""


def load_torch(path: str) -> Call:
    return torch.export.load(path).module()


def load_aoti(path: str) -> Call:
    from torch._inductor import aoti_load_package

    return aoti_load_package(path)


def load_onnx(path: str) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def call(*args: Any, **kwargs: Any) -> Any:
        values = tensors_of([*args, kwargs])
        inputs = {name: value.numpy() for name, value in zip(names, values, strict=True)}
        return [torch.from_numpy(found) for found in session.run(None, inputs)]

    return call


def load_executorch(path: str) -> Call:
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(path)
    method = program.load_method("forward")

    def call(*args: Any, **kwargs: Any) -> Any:
        inputs = [tensor.contiguous() for tensor in tensors_of([*args, kwargs])]
        return [each.clone() for each in method.execute(inputs)]  # the next call writes to the same memory

    return call


def load_gguf(path: str) -> Call:
    """Read the file with transformers' own reader, which changes weights back to the order of its model."""
    import transformers

    folder, name = os.path.split(path)
    config = transformers.AutoConfig.from_pretrained(os.path.join(folder, "config"))
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, gguf_file=name, config=config, dtype=torch.float32).eval()


def load_hf(path: str) -> Call:
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    tokens = os.path.join(os.path.dirname(path), "tokens.json")
    if os.path.exists(tokens):
        with open(tokens, encoding="utf-8") as file:
            known = json.load(file)
        found = transformers.AutoTokenizer.from_pretrained(path)(known["text"])["input_ids"]
        if found != known["ids"]:
            raise SystemExit(f"the tokenizer makes other tokens: {found}")
    return getattr(transformers, config.architectures[0]).from_pretrained(path).eval()


def load_peft(path: str) -> Call:
    import peft

    return peft.PeftModel.from_pretrained(load_hf(f"{path}/../base"), path).eval()


def load_weights(path: str) -> Call:
    """Fill the program beside the weights. It has zeros where the model has quantized weights."""
    with safe_open(path, "pt") as file:
        aliases = file.metadata()
    tensors = load_file(path)
    state = {name: value for name, value in tensors.items() if not is_scale(name, tensors)}
    for name in [name for name in state if f"{name}_scale" in tensors]:
        scale = tensors[f"{name}_scale"]
        groups = state[name].float().view(*scale.shape, -1)
        state[name] = (groups * scale[..., None]).view(state[name].shape)
    program = torch.export.load(os.path.join(os.path.dirname(path), "program.pt2")).module()
    state |= {name: state[first] for name, first in aliases.items() if first in state}
    whole = state.keys() <= program.state_dict().keys()  # a model of transformers is a part, `model`, of the program
    program.load_state_dict(state if whole else {f"model.{name}": value for name, value in state.items()})
    return program


def is_scale(name: str, tensors: dict[str, torch.Tensor]) -> bool:
    weight = tensors.get(name.removesuffix("_scale"))
    return name.endswith("_scale") and weight is not None and weight.dtype == torch.int8


def value_of(form: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    ((kind, value),) = form.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {name: value_of(item, tensors) for name, item in value.items()}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(value_of(item, tensors) for item in value)
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict) or hasattr(value, "items"):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def compare(call: Call, rows: list[Any], tensors: dict[str, torch.Tensor]) -> tuple[float, float]:
    difference = relative = 0.0
    for row in rows:
        found = tensors_of(call(*value_of(row["args"], tensors), **value_of(row["kwargs"], tensors)))
        expected = tensors_of(value_of(row["outputs"], tensors))
        if [each.shape for each in found] != [each.shape for each in expected]:
            raise SystemExit(f"the outputs have the shapes {[list(each.shape) for each in found]}")
        for ours, theirs in zip(found, expected, strict=True):
            ours, theirs = ours.double(), theirs.double()
            if ours.numel():
                found_difference = float((ours - theirs).abs().max())
                found_relative = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
                difference = difference if found_difference <= difference else found_difference  # NaN stays
                relative = relative if found_relative <= relative else found_relative
    return difference, relative


def median_milliseconds(call: Call, row: Any, tensors: dict[str, torch.Tensor]) -> float:
    args, kwargs = value_of(row["args"], tensors), value_of(row["kwargs"], tensors)
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(times) < CALLS and (not times or time.perf_counter() < end):
        began = time.perf_counter()
        call(*args, **kwargs)
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


LOADERS: dict[str, Callable[[str], Call]] = {
    "safetensors": load_weights,
    "torch": load_torch,
    "aoti": load_aoti,
    "onnx": load_onnx,
    "executorch": load_executorch,
    "hf": load_hf,
    "peft": load_peft,
    "gguf": load_gguf,
}


def main(kind: str, path: str, folder: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    tensors = load_file(f"{folder}/samples.safetensors")
    with open(f"{folder}/samples.json", encoding="utf-8") as file:
        rows = json.load(file)
    call = LOADERS[kind](path)
    with torch.no_grad():
        difference, relative = compare(call, rows, tensors)
        milliseconds = median_milliseconds(call, rows[0], tensors)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        json.dumps(
            {
                "difference": difference,
                "relative": relative,
                "milliseconds": milliseconds,
                "megabytes": peak,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
