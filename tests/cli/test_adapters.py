"""Adapters of peft with the command: deaths, and exports that transformers and peft load in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.cli.command import Command, last_json

pytest.importorskip("transformers", reason="needs pip install 'unisono[huggingface]'")
if find_spec("peft") is None:
    pytest.skip("needs pip install 'unisono[adapters]'", allow_module_level=True)

SCRIPT = """
from dataclasses import dataclass, field
import os, signal
from pathlib import Path
import torch
import unisono
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

LLAMA = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                    max_position_embeddings=16, use_cache=False)


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    batch: int = 16
    steps: int | None = 4
    dies: bool = field(default=False, metadata={"changes_bits": False})
    kind: str = "lora"


def build(kind, saves):
    base = AutoModelForCausalLM.from_config(LLAMA, dtype=torch.bfloat16 if kind == "bf16" else torch.float32)
    if saves:
        base.save_pretrained(Path(__file__).with_name("base"))
    if kind == "prompt":
        from peft import PromptTuningConfig

        return get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    if kind == "net":
        return get_peft_model(torch.nn.Sequential(torch.nn.Embedding(32, 32)), LoraConfig(target_modules=["0"]))
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
        from torchao.utils import unwrap_tensor_subclass

        quantize_(base.model.layers, Int8WeightOnlyConfig())
        return unwrap_tensor_subclass(get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])))
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=16, lora_dropout=0.1, target_modules="all-linear"))
    if kind == "named":
        model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
        model.set_adapter("second")
    return model


def main(run):
    kind = run.settings.kind
    tokens = torch.randint(0, 32, (64, 10), generator=torch.Generator().manual_seed(0))
    model = run.place(lambda: build(kind, run.is_main))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(torch.utils.data.TensorDataset(tokens)):
        for (x,) in step:
            out = model(x) if kind == "net" else model(input_ids=x).logits
            logits = out[:, -x.shape[1] : -1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="sum")
            step.backward(loss, x[:, 1:].numel())
        flag = Path(__file__).with_name("died")
        if run.settings.dies and step.number == 2 and run.rank == 1 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        step.update(optimizer)


if __name__ == "__main__":
    unisono.main(main, Settings)
"""

COMPARE = """
import json, sys
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

name, path, base = sys.argv[1:]
if name == "hf":
    sys.modules["peft"] = None
else:
    from peft import PeftModel
x = torch.arange(20).view(2, 10) % 32
with torch.no_grad():
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    logits = model(input_ids=x).logits
    model = AutoModelForCausalLM.from_pretrained(path) if name == "hf" else PeftModel.from_pretrained(model, path)
    changed = model.eval()(input_ids=x).logits
print(json.dumps({"unisono": "unisono" in sys.modules, "norm": float((changed - logits).norm() / logits.norm())}))
torch.save(changed, path + ".pt")
"""


def trained(command: Command, *words: str) -> None:
    command.script(SCRIPT)
    ended = command.run("run", "script.py", "--run-dir", "out", *words, times=3)
    assert ended.status == 0, ended.err


def used_again(command: Command, kind: str) -> tuple[float, torch.Tensor]:
    """Load an export in a fresh process; return how far it is from the base model, and its outputs."""
    command_line = [sys.executable, "-c", COMPARE, kind, kind, "base"]
    done = subprocess.run(command_line, cwd=command.folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts = last_json(done.stdout)
    assert not facts["unisono"]
    return facts["norm"], torch.load(command.folder / f"{kind}.pt")


def weights_of(command: Command, run: str) -> str:
    return str(json.loads((command.folder / run / "result.json").read_text())["weights_sha256"])


LAYOUTS = {
    "lora": ("--ranks", "3"),
    "int8": ("--ranks", "2"),  # each process imports torchao, transformers and peft
    "int8 in shards": ("--ranks", "4", "--set", "parallel.shard=2"),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_others_continue_when_a_process_dies(command: Command, kind: str) -> None:
    if kind != "lora":
        pytest.importorskip("torchao", reason="needs pip install torchao")
    model, layout = ("--set", f"kind={kind.split()[0]}"), LAYOUTS[kind]
    command.script(SCRIPT)
    command.train("out", *model)
    alone = weights_of(command, "out")
    ended = command.run("run", "script.py", "--run-dir", "dies", "--set", "dies=true", *model, *layout, times=3)
    assert ended.status == 0, ended.err
    assert "Process 1 died of SIGKILL" in ended.err
    assert weights_of(command, "dies") == alone


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--ranks", "2", "--set", "parallel.shard=2")], ids=["whole", "sharded"])
def test_merged_and_alone_have_the_outputs_of_the_model(command: Command, words: tuple[str, ...]) -> None:
    trained(command, *words)
    for kind in ("hf", "peft"):
        ended = command.run("export", "out", kind, "--format", kind, "--json", times=5)
        assert ended.status == 0, ended.err
        report = last_json(ended.out)
        assert report["relative"] < 1e-6
        assert report["weights_sha256"] == weights_of(command, "out")
    merged = {path.name for path in (command.folder / "hf").iterdir()}
    assert {"config.json", "model.safetensors", "export.json", "README.md"} <= merged
    assert not [name for name in merged if "adapter" in name]
    alone = {path.name for path in (command.folder / "peft").iterdir()}
    assert alone == {"adapter_config.json", "adapter_model.safetensors", "export.json", "README.md"}
    assert report["parameters"] == 2 * 4 * (4 * 32 + 3 * 48)
    (change, outputs), (change_alone, outputs_alone) = (used_again(command, kind) for kind in ("hf", "peft"))
    assert min(change, change_alone) > 0.05, "the adapter changes nothing"
    assert (outputs - outputs_alone).norm() < 1e-5 * outputs.norm()


@pytest.mark.slow
def test_a_base_of_16_bits_is_merged_in_float32(command: Command) -> None:
    trained(command, "--set", "kind=bf16")
    ended = command.run("export", "out", "hf", "--format", "hf", "--json", times=5)
    assert ended.status == 0, ended.err
    assert last_json(ended.out)["merged"] == ["default"]
    assert json.loads((command.folder / "hf" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.slow
def test_an_adapter_of_another_name(command: Command) -> None:
    trained(command, "--set", "kind=named")
    ended = command.run("export", "out", "peft", "--format", "peft", "--json", times=5)
    assert ended.status == 0, ended.err
    assert last_json(ended.out)["adapter"] == "second"
    assert json.loads((command.folder / "peft" / "adapter_config.json").read_text())["r"] == 2


REFUSED = {
    "hf of a prompt": ("prompt", "hf", "change no weights of the model.", "--format peft"),
    "peft of a model of its own": ("net", "peft", "It is no model of transformers", "--format torch"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_exports_that_are_refused(command: Command, name: str) -> None:
    kind, asked, fact, do = REFUSED[name]
    trained(command, "--set", f"kind={kind}")
    ended = command.run("export", "out", "folder", "--format", asked, times=5)
    assert ended.status == 1
    assert fact in ended.err
    assert do in ended.err
    assert "Traceback" not in ended.err
    assert not (command.folder / "folder").exists()


@pytest.mark.slow
def test_a_prompt_alone(command: Command) -> None:
    trained(command, "--set", "kind=prompt")
    ended = command.run("export", "out", "folder", "--format", "peft", "--json", times=5)
    assert ended.status == 0, ended.err
    assert last_json(ended.out)["class"] == "PROMPT_TUNING adapter of LlamaForCausalLM"


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--quantize", "int8")], ids=["float", "int8"])
def test_a_program_has_the_adapter_merged(command: Command, words: tuple[str, ...]) -> None:
    trained(command)
    ended = command.run("export", "out", "model.pt2", "--format", "torch", *words, "--json", times=5)
    assert ended.status == 0, ended.err
    report = last_json(ended.out)
    assert (report["class"], report["merged"]) == ("LlamaForCausalLM", ["default"])
    assert report["relative"] < 1e-5
    code = "import sys, torch; m = torch.export.load(sys.argv[1]).module(); "
    code += "print(list(m(input_ids=torch.arange(21).view(3, 7))['logits'].shape), 'transformers' in sys.modules)"
    path = str(command.folder / "model.pt2")
    done = subprocess.run([sys.executable, "-I", "-c", code, path], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[3, 7, 32] False"
