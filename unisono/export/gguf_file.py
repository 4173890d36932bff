"""Write a model of transformers as a GGUF file, which llama.cpp and the programs that are built on it load.

    LlamaForCausalLM    llama    rows of q and k in the order of llama.cpp, whose rotary embedding pairs neighbors
    GPT2LMHeadModel     gpt2     matrices of Conv1D transposed

Names of tensors and keys are those of the package gguf. Matrices are float32, or blocks of 32 integers of 8 bits that
share a scale (Q8_0). The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

gguf is imported in functions, because it is an optional package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unisono.errors import LoopError
from unisono.export.formats import FORMATS, ExportRequest
from unisono.export.tokenizer_files import tokenizer_of

BLOCK = 32
"""Weights of Q8_0 that share a scale."""

ARCHITECTURES = {"LlamaForCausalLM": "llama", "GPT2LMHeadModel": "gpt2"}
"""Names of architectures in gguf, by class of transformers."""

NO_TOKENIZER = "no_vocab"
"""What a file without a tokenizer has in place of one."""


class FileTensor(NamedTuple):
    """A parameter, and its form in the file.

    Attributes:
        name: The name in the file.
        parameter: The parameter of the model.
        stored: Whether the file may hold it as integers.
        to_file: Changes the order of the elements to that of the file.
        to_model: Does the reverse.
    """

    name: str
    parameter: torch.Tensor
    stored: bool
    to_file: Callable[[torch.Tensor], torch.Tensor]
    to_model: Callable[[torch.Tensor], torch.Tensor]


def write_gguf(model: torch.nn.Module, path: Path, request: ExportRequest) -> dict[str, Any]:
    """Write a model with its hyperparameters, and with the tokenizer if there is one.

    Beside the file it writes the configuration of transformers, for the process that loads the file again.

    Args:
        model: The model.
        path: The file.
        request: Names the quantization, int8 or none, and the tokenizer.

    Returns:
        What to report.

    Raises:
        LoopError: The architecture, or a part of its configuration, has no form in GGUF.
    """
    import gguf

    architecture = _architecture(model)
    config: Any = model.config
    tensors = list(_tensors(model))
    writer = gguf.GGUFWriter(path, architecture)
    kind = gguf.LlamaFileType.MOSTLY_Q8_0 if request.quantize else gguf.LlamaFileType.ALL_F32
    writer.add_name(type(model).__name__)
    writer.add_file_type(kind)
    writer.add_vocab_size(config.vocab_size)
    {"llama": _llama_keys, "gpt2": _gpt2_keys}[architecture](writer, config)
    tokenizer = _add_tokenizer(writer, request, model)
    for tensor in tensors:
        values = tensor.to_file(tensor.parameter.detach().cpu().float()).contiguous().numpy()
        integers = tensor.stored and bool(request.quantize)
        quantized = gguf.GGMLQuantizationType.Q8_0 if integers else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(values, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config.save_pretrained(path.with_name("config"))
    return {"architecture": architecture, "tokenizer": tokenizer}


def round_weights(model: torch.nn.Module, kind: str) -> dict[str, Any]:
    """Round the matrices of a model to the values that Q8_0 can hold, in place, and return facts for the report."""
    import gguf

    rounded = 0
    tensors = list(_tensors(model))
    for tensor in tensors:
        if tensor.stored:
            values = tensor.to_file(tensor.parameter.detach().cpu().float()).contiguous().numpy()
            integers = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            found = torch.from_numpy(gguf.dequantize(integers, gguf.GGMLQuantizationType.Q8_0))
            with torch.no_grad():
                tensor.parameter.copy_(tensor.to_model(found))
            rounded += 1
    matrices = [tensor for tensor in tensors if tensor.parameter.dim() == 2]
    return {
        "quantize": kind,
        "quantized_layers": rounded,
        "float_layers": [tensor.name for tensor in matrices if not tensor.stored],
    }


def _architecture(model: torch.nn.Module) -> str:
    """Return the name of the architecture in gguf."""
    name = type(model).__name__
    if name not in ARCHITECTURES or not type(model).__module__.startswith("transformers."):
        raise _refused(model, f"The supported classes of transformers are {', '.join(ARCHITECTURES)}.")
    config: Any = model.config
    activation = config.hidden_act if name.startswith("Llama") else config.activation_function
    wanted = ("silu", "swish") if name.startswith("Llama") else ("gelu_new", "gelu_pytorch_tanh")
    if activation not in wanted:
        raise _refused(model, f"Its activation is {activation}, and llama.cpp computes {wanted[0]} for this class.")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ("default", "linear"):
        raise _refused(model, f"Its rotary embedding is scaled by {rope['rope_type']}; default and linear are known.")
    return ARCHITECTURES[name]


def _refused(model: torch.nn.Module, fact: str) -> LoopError:
    return LoopError(
        f"Cannot export the {type(model).__name__} as {FORMATS['gguf'].text}.",
        fact,
        "--format hf for a model of transformers, --format torch for any other model",
    )


def _llama_keys(writer: Any, config: Any) -> None:
    """Add the hyperparameters of a Llama."""
    import gguf

    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _gpt2_keys(writer: Any, config: Any) -> None:
    """Add the hyperparameters of a GPT-2."""
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)


def _tensors(model: torch.nn.Module) -> Iterator[FileTensor]:
    """Yield the parameters of a model with their forms in the file. A tied output layer is left out."""
    import gguf

    architecture = gguf.MODEL_ARCH[_architecture(model).upper()]
    config: Any = model.config
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, parameter in model.named_parameters():  # names a tied one once, as the embedding
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise _refused(model, f"Its parameter {name} has no name in GGUF.")
        to_file, to_model = _orders(name, config)
        columns = to_file(parameter).shape[-1]
        stored = parameter.dim() == 2 and columns % BLOCK == 0 and "position_embd" not in found
        yield FileTensor(found, parameter, stored, to_file, to_model)


def _orders(name: str, config: Any) -> Sequence[Callable[[torch.Tensor], torch.Tensor]]:
    """Return the functions that change a parameter to the order of the file, and back."""
    part = name.split(".")[-2]
    if part in ("q_proj", "k_proj"):
        heads = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads

        def paired(tensor: torch.Tensor) -> torch.Tensor:
            """Put rows i and i + half of each head beside each other."""
            return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)

        def halved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)

        return paired, halved
    if name.endswith(".weight") and part in ("c_attn", "c_proj", "c_fc"):
        return torch.t, torch.t
    return _same, _same


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _add_tokenizer(writer: Any, request: ExportRequest, model: Any) -> str:
    """Add a byte-level BPE tokenizer. Return what the file has."""
    import gguf

    tokenizer = tokenizer_of(request, model)
    if tokenizer is None:
        writer.add_tokenizer_model(NO_TOKENIZER)
        return "none"
    known = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {"model": {}}
    before = known.get("pre_tokenizer") or {}
    if known["model"].get("type") != "BPE" or before.get("type") != "ByteLevel" or not before.get("use_regex", True):
        writer.add_tokenizer_model(NO_TOKENIZER)
        return "none: only byte-level BPE tokenizers with the pattern of GPT-2 are written to GGUF"
    added = {entry["id"]: entry for entry in known["added_tokens"]}
    texts = {number: text for text, number in tokenizer.get_vocab().items()}
    kinds = []
    for number in range(model.config.vocab_size):
        entry = added.get(number)
        kind = gguf.TokenType.NORMAL if number in texts else gguf.TokenType.UNUSED
        if entry is not None:
            kind = gguf.TokenType.CONTROL if entry["special"] else gguf.TokenType.USER_DEFINED
        kinds.append(kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([texts.get(number, f"[PAD{number}]") for number in range(model.config.vocab_size)])
    writer.add_token_types(kinds)
    merges = known["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    for name in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{name}_token_id")
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(False)
    return "gpt2"
