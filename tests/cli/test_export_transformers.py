"""`unisono export` of models of transformers: shards, tokenizers, GGUF, and programs with plain outputs."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.command import Command, last_json

pytest.importorskip("transformers", reason="needs transformers: pip install 'unisono[huggingface]'")

SCRIPT = """
from dataclasses import dataclass
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    batch: int = 16
    steps: int | None = 4
    kind: str = "llama"
    tokenizer: str = "run"


class Own(GPT2LMHeadModel):
    pass


def build(kind):
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, bos_token_id=0, eos_token_id=0))
    small = GPT2Config(vocab_size=300, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    if kind == "relu":
        small.activation_function = "relu"
    return (Own if kind == "own" else GPT2LMHeadModel)(small)


def tokenizer():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=["<|end|>"], initial_alphabet=alphabet,
                                  show_progress=False)
    made.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<|end|>", eos_token="<|end|>")


def measure(logits, x):
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten(), reduction="sum")
    return {"nats": (loss, x[:, 1:].numel())}


def main(run):
    tokens = torch.randint(0, 300, (64, 12), generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(tokens)
    model = run.place(lambda: build(run.settings.kind))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    if run.settings.tokenizer == "run" and run.is_main:
        tokenizer().save_pretrained(run.dir / "tokenizer")

    def forward(model, batch):
        out = model(input_ids=batch[0])
        return out["logits"]

    for step in run.steps(data):
        step.run(model, lambda logits, x: measure(logits, x)["nats"], forward=forward)
        step.update(optimizer)
    run.log(run.evaluate(model, data, measure, forward=forward))


if __name__ == "__main__":
    unisono.main(main, Settings)
"""


def exported(command: Command, kind: str, out: str, *words: str, sets: tuple[str, ...] = ()) -> dict[str, Any]:
    """Train in shards on two processes, export, and return the report."""
    command.script(SCRIPT)
    if not (command.folder / "out").exists():
        command.train("out", f"--set=kind={kind}", "--set=parallel.shard=2", *sets, ranks=2)
    ended = command.run("export", "out", out, *words, "--json", times=10)
    assert ended.status == 0, ended.err
    report = last_json(ended.out)
    assert isinstance(report, dict)
    result = json.loads((command.folder / "out" / "result.json").read_text())
    assert report["weights_sha256"] == result["weights_sha256"]
    if "quality" in report:
        assert report["quality"]["original"]["nats"] == pytest.approx(result["nats"], rel=1e-6)
    return report


FRESH = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("the quick brown fox", return_tensors="pt")
with torch.no_grad():
    logits = model.eval()(input_ids=ids["input_ids"]).logits
print(json.dumps({"unisono": "unisono" in sys.modules, "ids": ids["input_ids"][0].tolist(),
                  "text": tokenizer.decode(ids["input_ids"][0]), "shape": list(logits.shape)}))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_shards_with_an_index_and_the_tokenizer(command: Command) -> None:
    report = exported(command, "llama", "folder", "--format", "hf", "--shard-size", "100KB")
    assert report["relative"] == 0.0
    assert report["quality"]["exported"] == report["quality"]["original"]
    folder = command.folder / "folder"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert (report["shards"], sorted(set(index["weight_map"].values()))) == (len(files), files)
    assert len(files) > 1
    assert max(path.stat().st_size for path in folder.glob("*.safetensors")) < 110_000
    done = subprocess.run([sys.executable, "-I", "-c", FRESH, str(folder)], check=True, capture_output=True, text=True)
    found = last_json(done.stdout)
    assert (found["unisono"], found["text"]) == (False, "the quick brown fox")
    assert found["shape"] == [1, len(found["ids"]), 300]
    assert len(found["ids"]) < 10, "the merges are missing"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_gguf_file_has_the_weights(command: Command, kind: str) -> None:
    gguf: Any = pytest.importorskip("gguf", reason="needs gguf: pip install 'unisono[gguf]'")
    report = exported(command, kind, "model.gguf", "--format", "gguf", "--no-evaluate")
    assert (report["architecture"], report["tokenizer"], report["relative"]) == (kind, "gpt2", 0.0)
    reader = gguf.GGUFReader(command.folder / "model.gguf")
    assert reader.get_field("tokenizer.ggml.tokens").contents()[0] == "<|end|>"
    assert reader.get_field("tokenizer.ggml.merges").contents()
    assert len(reader.get_field("tokenizer.ggml.tokens").contents()) == 300
    if kind == "llama":
        exported(command, kind, "weights.safetensors")
        from safetensors.torch import load_file

        weights = load_file(command.folder / "weights.safetensors")
        (stored,) = [each for each in reader.tensors if each.name == "blk.0.attn_k.weight"]
        wanted = weights["model.layers.0.self_attn.k_proj.weight"]
        found = torch.from_numpy(stored.data.copy())
        assert torch.equal(found[0::2][:8], wanted[:8]), "rows of a pair are not neighbors"
        assert torch.equal(found[1::2][:8], wanted[8:16])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_quantized_gguf_file(command: Command) -> None:
    gguf: Any = pytest.importorskip("gguf", reason="needs gguf: pip install 'unisono[gguf]'")
    report = exported(command, "gpt2", "model.gguf", "--format", "gguf", "--quantize", "int8")
    assert report["relative"] < 1e-6
    assert 1e-3 < report["relative_to_unquantized"] < 0.05
    assert report["bytes"] < 0.5 * report["unquantized_bytes"]
    assert report["quality"]["exported"] != report["quality"]["original"]
    assert report["quality"]["exported"]["nats"] == pytest.approx(report["quality"]["original"]["nats"], rel=1e-2)
    kinds = {each.name: each.tensor_type.name for each in gguf.GGUFReader(command.folder / "model.gguf").tensors}
    assert (kinds["blk.0.attn_qkv.weight"], kinds["output_norm.weight"]) == ("Q8_0", "F32")
    assert "Q8_0" in (command.folder / "model.gguf.md").read_text()


LLAMA_CPP = """
import json, sys
import llama_cpp
import numpy as np

model = llama_cpp.Llama(sys.argv[1], n_ctx=32, logits_all=True, verbose=False, n_threads=1)
tokens = json.loads(sys.argv[2])
model.eval(tokens)
text = model.tokenize(b"the quick brown fox", add_bos=False)
print(json.dumps({"logits": np.array(model.scores[: len(tokens)]).tolist(), "ids": text}))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_llama_cpp_computes_the_same_logits(command: Command, kind: str) -> None:
    for package in ("gguf", "llama_cpp"):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install 'unisono[gguf]' llama-cpp-python")
    exported(command, kind, "model.gguf", "--format", "gguf", "--no-evaluate")
    exported(command, kind, "folder", "--format", "hf", "--no-evaluate")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = list(range(3, 27, 2))
    words = [sys.executable, "-c", LLAMA_CPP, str(command.folder / "model.gguf"), json.dumps(tokens)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = last_json(done.stdout)
    model = AutoModelForCausalLM.from_pretrained(command.folder / "folder").eval()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
    logits = torch.tensor(found["logits"])
    assert (logits - expected).norm() / expected.norm() < 2e-3, "llama.cpp rounds its cache of attention to 16 bits"
    tokenizer = AutoTokenizer.from_pretrained(command.folder / "folder")
    assert found["ids"] == tokenizer("the quick brown fox")["input_ids"]


NEEDED = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "executorch": ("executorch",),
    "torch": (),
    "aoti": (),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("name", NEEDED)
def test_a_program_has_plain_outputs(command: Command, name: str, kind: str) -> None:
    for package in NEEDED[name]:
        if find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install {package}")
    report = exported(command, kind, "model", "--format", name)
    assert report["relative"] < (1e-6 if name == "torch" else 1e-5)
    assert report["quality"]["exported"]["nats"] == pytest.approx(report["quality"]["original"]["nats"], rel=1e-4)
    assert list(report["inputs"]) == ["input_ids"]
    if name == "torch":
        code = "import sys, torch; m = torch.export.load(sys.argv[1]).module(); "
        code += "print(list(m(input_ids=torch.arange(21).view(3, 7))['logits'].shape), 'transformers' in sys.modules)"
        path = str(command.folder / "model")
        done = subprocess.run([sys.executable, "-I", "-c", code, path], check=True, capture_output=True, text=True)
        assert done.stdout.split("\n")[-2] == "[3, 7, 300] False"


REFUSED = {
    "a class of the script": ("own", "hf", "so from_pretrained has no code for it"),
    "an unknown class": ("own", "gguf", "are LlamaForCausalLM, GPT2LMHeadModel"),
    "another activation": ("relu", "gguf", "Its activation is relu"),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", REFUSED)
def test_models_that_a_format_cannot_hold(command: Command, name: str) -> None:
    kind, format_, expected = REFUSED[name]
    if format_ == "gguf":
        pytest.importorskip("gguf", reason="needs gguf: pip install 'unisono[gguf]'")
    command.script(SCRIPT)
    command.train("out", f"--set=kind={kind}", "--set=tokenizer=none")
    ended = command.run("export", "out", "model", "--format", format_, times=10)
    assert (ended.status, expected in ended.err) == (1, True), ended.err
    assert "Traceback" not in ended.err
    assert sorted(path.name for path in command.folder.iterdir()) == ["alive", "out", "script.py"]


TOKENIZERS = {
    "damaged": ("tokenizer.json", "{", "Cannot load the tokenizer in"),
    "of another model": ("", "", "does not belong to the model"),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_cannot_be_exported(command: Command, tmp_path: Path, name: str) -> None:
    file, text, expected = TOKENIZERS[name]
    command.script(SCRIPT)
    command.train("out", "--set=kind=gpt2")
    if file:
        (command.folder / "out" / "tokenizer" / file).write_text(text)
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(command.folder / "out" / "tokenizer")
        tokenizer.add_tokens([f"<{number}>" for number in range(20)])
        tokenizer.save_pretrained(command.folder / "out" / "tokenizer")
    ended = command.run("export", "out", "folder", "--format", "hf", "--no-evaluate", times=10)
    assert (ended.status, expected in ended.err) == (1, True), ended.err
    assert "Traceback" not in ended.err
    assert not (command.folder / "folder").exists()


FLAGS = {
    "shards of a program": (("--format", "torch", "--shard-size", "5GB"), "Only a folder of transformers has shards."),
    "no size": (("--format", "hf", "--shard-size", "5"), "--shard-size 5 is no size."),
    "a tokenizer of a program": (("--format", "torch", "--tokenizer", "."), "--format torch cannot be combined with"),
    "no such folder": (("--format", "hf", "--tokenizer", "gone"), "There is no folder gone."),
}


@pytest.mark.parametrize("name", FLAGS)
def test_wrong_flags(command: Command, name: str) -> None:
    words, expected = FLAGS[name]
    (command.folder / "out" / "checkpoints" / "step-00000001").mkdir(parents=True)
    ended = command.run("export", "out", "model", *words)
    assert (ended.status, expected in ended.err) == (2, True), ended.err
    assert "Traceback" not in ended.err
    assert not (command.folder / "model").exists()
