"""`unisono export --quantize`: quantized programs and weights that a process without torchao loads."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.command import Command, last_json

needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None, reason="needs torchao: pip install 'unisono[quantize]'"
)

SCRIPT = '''
import torch.nn.functional as F
from dataclasses import dataclass, field
import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    batch: int = 16
    steps: int | None = 6
    kind: str = "plain"
    dies: bool = field(default=False, metadata={"changes_bits": False})


class Net(nn.Module):
    """An embedding tied to the last layer, a buffer that is not saved, and one layer with 8 inputs."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(40, 64)
        self.hidden = nn.Linear(64, 8)
        self.wide = nn.Linear(8, 64)
        self.head = nn.Linear(64, 40, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("shift", torch.ones(64), persistent=False)

    def forward(self, x):
        x = self.tokens(x) + self.shift
        return self.head(x + self.wide(torch.relu(self.hidden(x))))


class Filters(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, 8)
        self.filter = nn.Conv1d(8, 40, 1)

    def forward(self, x):
        return self.filter(self.table(x).transpose(1, 2)).transpose(1, 2)


def build(kind):
    if kind == "filters":
        return Filters()
    model = Net()
    if kind != "plain":
        from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_
        from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

        base = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32 if kind == "aware" else 64))
        config = QATConfig(base, step="prepare")
        if kind == "aware8":
            config = QATConfig(weight_config=IntxFakeQuantizeConfig(torch.int8, "per_channel"), step="prepare")
        chosen = (model.hidden, model.head)
        quantize_(model, config, filter_fn=lambda layer, _: layer in chosen)
    return model


def main(run):
    tokens = torch.randint(0, 40, (64, 12), generator=torch.Generator().manual_seed(0))
    model = run.place(lambda: build(run.settings.kind))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(torch.utils.data.TensorDataset(tokens)):
        step.run(model, lambda out, x: (F.cross_entropy(out.flatten(0, 1), x.flatten(), reduction="sum"), x.numel()))
        if run.settings.dies and step.number == 2 and not Path(__file__).with_name("died").exists() and run.rank == 1:
            Path(__file__).with_name("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        step.update(optimizer)


if __name__ == "__main__":
    unisono.main(main, Settings)
'''

WITHOUT_TORCHAO = """
import json, sys
import torch
program = torch.export.load(sys.argv[1]).module()
found = program(torch.arange(36).view(3, 12))
print(json.dumps({"shape": list(found.shape), "torchao": "torchao" in sys.modules}))
"""


def trained(command: Command, *words: str) -> None:
    command.script(SCRIPT)
    command.train("out", *words)


def exported(command: Command, out: str, kind: str, *words: str) -> dict[str, Any]:
    ended = command.run("export", "out", out, "--quantize", kind, *words, "--json", times=3)
    assert ended.status == 0, ended.err
    report = last_json(ended.out)
    assert report["quantize"] == kind
    assert isinstance(report, dict)
    return report


BOUNDS = {"int8": (0.001, 0.02), "int8-dynamic": (0.001, 0.05), "int4": (0.02, 0.2)}
"""The difference to the unquantized model: at least, at most."""


@pytest.mark.slow
@needs_torchao
@pytest.mark.parametrize("kind", ["int8", "int8-dynamic", "int4"])
def test_a_program_needs_no_torchao(command: Command, kind: str) -> None:
    trained(command)
    report = exported(command, "model.pt2", kind, "--format", "torch")
    assert report["relative"] < (1e-2 if kind == "int8-dynamic" else 1e-6)
    least, most = BOUNDS[kind]
    assert least < report["relative_to_unquantized"] < most
    assert report["quantized_layers"] + len(report["float_layers"]) == 3
    assert report["float_layers"] == (["wide"] if kind == "int4" else [])
    assert min(report[f"unquantized_{name}"] for name in ("bytes", "milliseconds", "megabytes")) > 0
    path = command.folder / "model.pt2"
    done = subprocess.run(
        [sys.executable, "-I", "-c", WITHOUT_TORCHAO, str(path)], check=True, capture_output=True, text=True
    )
    assert last_json(done.stdout) == {"shape": [3, 12, 40], "torchao": False}
    state = torch.export.load(path).state_dict
    assert sum(value.dtype == torch.int8 and value.numel() > 1000 for value in state.values()) == 1, state.keys()
    card = (command.folder / "model.pt2.md").read_text()
    assert "## Quantization" in card
    assert "| ms of a call | " in card


@needs_torchao
@pytest.mark.slow
def test_weights_as_integers_and_scales(command: Command) -> None:
    trained(command)
    report = exported(command, "model.safetensors", "int4")
    assert report["relative"] < 1e-5
    assert "milliseconds" not in report
    assert "milliseconds" not in (command.folder / "model.safetensors.md").read_text()
    found = load_file(command.folder / "model.safetensors")
    assert command.run("export", "out", "whole.safetensors").status == 0
    whole = load_file(command.folder / "whole.safetensors")
    integers = found["hidden.weight"].view(8, 2, 32)
    assert found["hidden.weight"].dtype == torch.int8
    assert (int(integers.min()) >= -8, int(integers.max()) <= 7) == (True, True)
    values = (integers * found["hidden.weight_scale"][..., None]).view(8, 64)
    assert (values - whole["hidden.weight"]).abs().max() < 0.6 * found["hidden.weight_scale"].max()
    assert torch.equal(found["tokens.weight"], whole["tokens.weight"]), "an embedding was quantized"


@needs_torchao
@pytest.mark.slow
def test_compiled_code(command: Command) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    trained(command)
    assert exported(command, "model.pt2", "int8", "--format", "aoti")["relative"] < 1e-5


@needs_torchao
@pytest.mark.slow
def test_a_killed_run_that_was_trained_for_int4_is_converted(command: Command) -> None:
    """A process of two is killed; the run ends with the weights of one process, and its export has rounded ones."""
    command.script(SCRIPT)
    words = ("--set", "kind=aware", "--set", "checkpoint.every=1")
    command.train("alone", *words)
    ended = command.run("run", "script.py", "--ranks", "2", "--run-dir", "out", *words, "--set", "dies=true", times=2)
    assert ended.status == 0, ended.err
    assert (command.folder / "died").exists()
    results = [json.loads((command.folder / name / "result.json").read_text()) for name in ("alone", "out")]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    assert {each["promise"] for each in results} == {"exact"}
    report = exported(command, "model.pt2", "int4", "--format", "torch")
    assert (report["quantized_layers"], report["float_layers"]) == (2, ["wide"])
    assert report["weights_sha256"] == results[1]["weights_sha256"]


@needs_torchao
@pytest.mark.slow
def test_a_model_that_was_trained_for_int8_is_converted(command: Command) -> None:
    """The integers are those that the forward pass of the training has used."""
    trained(command, "--set", "kind=aware8")
    report = exported(command, "model.safetensors", "int8")
    assert (report["quantized_layers"], report["float_layers"]) == (3, [])
    found = load_file(command.folder / "model.safetensors")
    assert command.run("export", "out", "whole.safetensors").status == 0
    whole = load_file(command.folder / "whole.safetensors")["hidden.weight"]

    from torchao.quantization.qat import IntxFakeQuantizeConfig
    from torchao.quantization.qat.fake_quantizer import IntxFakeQuantizer

    rounded = IntxFakeQuantizer(IntxFakeQuantizeConfig(torch.int8, "per_channel"))(whole)
    values = found["hidden.weight"] * found["hidden.weight_scale"]
    assert (values - rounded).abs().max() < 1e-3 * found["hidden.weight_scale"].max()
    assert not torch.equal(rounded, whole)


REFUSED = {
    "no linear layer": ("filters", "int8", "It has no torch.nn.Linear"),
    "other groups": ("other", "int4", "was trained for another quantization"),
    "another kind": ("aware", "int8", "was trained for another quantization"),
    "int8 as int4": ("aware8", "int4", "was trained for another quantization"),
    "int8 as int8-dynamic": ("aware8", "int8-dynamic", "was trained for another quantization"),
}


@needs_torchao
@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_quantized(command: Command, name: str) -> None:
    model, kind, expected = REFUSED[name]
    trained(command, "--set", f"kind={model}")
    ended = command.run("export", "out", "model.pt2", "--format", "torch", "--quantize", kind)
    assert (ended.status, expected in ended.err) == (1, True), ended.err
    assert "Traceback" not in ended.err
    assert not (command.folder / "model.pt2").exists()


WRONG = {
    "an unknown quantization": (("--format", "torch", "--quantize", "int2"), "There is no quantization int2."),
    "onnx": (("--format", "onnx", "--quantize", "int8"), "onnxruntime quantizes models of ONNX itself"),
    "hf": (("--format", "hf", "--quantize", "int8"), "TorchAoConfig"),
    "activations in a file of weights": (("--quantize", "int8-dynamic"), "needs a format that holds a program"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests(command: Command, name: str) -> None:
    words, expected = WRONG[name]
    (command.folder / "out" / "checkpoints" / "step-00000001").mkdir(parents=True)
    ended = command.run("export", "out", "model", *words)
    assert ended.status == 2
    assert expected in ended.err, ended.err
    assert "Traceback" not in ended.err
    assert not (command.folder / "model").exists()


def test_a_missing_torchao_is_named(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.errors import SettingsError
    from unisono.export import formats

    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install 'unisono\[quantize\]'"):
        formats.require_quantization("int8", "torch", "unisono export out model.pt2")
