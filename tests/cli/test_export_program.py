"""`unisono export --format`: programs that a fresh process without Unisono loads, with the outputs of the model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.command import Command, last_json

SCRIPT = '''
from dataclasses import dataclass
import torch
import torch.nn.functional as F
import unisono


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    batch: int = 16
    steps: int | None = 6
    kind: str = "plain"


class Net(torch.nn.Module):
    """Batch norm, dropout, and two inputs, of which one is optional."""

    def __init__(self, kind):
        super().__init__()
        self.enter = torch.nn.Linear(4, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout(0.5)
        self.leave = torch.nn.Linear(8, 3)
        self.kind = kind

    def forward(self, x, scale=None):
        x = self.drop(torch.relu(self.norm(self.enter(x))))
        if self.kind == "branches" and x.sum() > 0:
            x = x + 1
        if self.kind == "random":
            x = x + torch.rand(8)
        x = self.leave(x)
        return x if scale is None else {"logits": x * scale[:, None], "plain": x}


def main(run):
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    model = run.place(lambda: Net(run.settings.kind))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data):
        for x, y in step:
            out = model(x, scale=torch.ones(len(x)))["logits"] if run.settings.kind == "scaled" else model(x)
            step.backward(F.cross_entropy(out, y, reduction="sum"), len(y))
        step.update(optimizer)
        if run.settings.kind == "unfinished" and step.number == 3:
            raise KeyboardInterrupt


if __name__ == "__main__":
    unisono.main(main, Settings)
'''


def trained(command: Command, *words: str) -> None:
    command.script(SCRIPT)
    ended = command.run("run", "script.py", "--run-dir", "out", *words)
    assert ended.status == 0, ended.err


def missing(kind: str) -> str:
    needed = {"onnx": ("onnx", "onnxscript", "onnxruntime")}.get(kind, ())
    return next((package for package in needed if find_spec(package) is None), "")


@pytest.mark.ci
@pytest.mark.parametrize(
    "words",
    [
        ("--ranks", "2", "--set", "parallel.shard=2"),
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(("--set", "precision=bf16"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_program_has_the_outputs_of_the_model(command: Command, words: tuple[str, ...]) -> None:
    trained(command, *words)
    ended = command.run("export", "out", "model.pt2", "--format", "torch", "--json")
    assert ended.status == 0, ended.err
    report = last_json(ended.out)
    assert report["relative"] < 1e-6
    assert (report["step"], report["samples"], report["class"]) == (6, 2, "Net")
    assert report == json.loads((command.folder / "model.pt2.export.json").read_text()) | {"out": "model.pt2"}
    assert report["weights_sha256"] in (command.folder / "model.pt2.md").read_text()
    program = torch.export.load(command.folder / "model.pt2").module()
    large = program(torch.ones(50, 4))
    assert torch.equal(large, program(torch.ones(50, 4))), "dropout is active"
    assert large.shape == (50, 3)
    assert (large[0] - large[1]).abs().max() < 1e-6, "batch norm computes statistics of the batch"


SEVERAL = """
import torch
import unisono

def total(output, x):
    return output.sum(), len(x)

def main(run):
    data = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
    models = {name: run.place(lambda: torch.nn.Linear(4, 2)) for name in ("first", "second", "unused")}
    optimizers = {f"{name}_optimizer": torch.optim.SGD(each.parameters(), lr=0.1) for name, each in models.items()}
    run.track(**models, **optimizers)
    for step in run.steps(data):
        for name in ("first", "second"):
            step.run(models[name], total, over=[optimizers[f"{name}_optimizer"]])
            step.update(optimizers[f"{name}_optimizer"])

if __name__ == "__main__":
    unisono.main(main)
"""


@pytest.mark.slow
def test_a_model_that_a_later_pass_calls(command: Command) -> None:
    """The first pass of the step trains another model. No optimizer steps, so the weights are those of the run."""
    command.script(SEVERAL)
    assert command.run("run", "script.py", "--run-dir", "out", "--set", "steps=3", "--set", "batch=16").status == 0
    ended = command.run("export", "out", "second.pt2", "--format", "torch", "--model", "second")
    assert ended.status == 0, ended.err
    assert command.run("export", "out", "second.safetensors", "--model", "second").status == 0
    weights = load_file(command.folder / "second.safetensors")
    found = torch.export.load(command.folder / "second.pt2").module().state_dict()
    assert {name.removeprefix("second."): value.tolist() for name, value in weights.items()} == {
        name: value.tolist() for name, value in found.items()
    }
    ended = command.run("export", "out", "unused.pt2", "--format", "torch", "--model", "unused")
    assert (ended.status, "does not call the model Linear in its first step" in ended.err) == (1, True), ended.err
    assert not (command.folder / "unused.pt2").exists()


@pytest.mark.slow
def test_inputs_by_name_and_outputs_in_a_dict(command: Command) -> None:
    trained(command, "--set", "kind=scaled")
    ended = command.run("export", "out", "model.pt2", "--format", "torch")
    assert ended.status == 0, ended.err
    assert "input x: " in ended.out
    assert "input scale: " in ended.out
    program = torch.export.load(command.folder / "model.pt2").module()
    found = program(torch.ones(3, 4), scale=torch.tensor([1.0, 2.0, 0.0]))
    torch.testing.assert_close(found["logits"][1], 2 * found["plain"][1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["aoti", "onnx"])
def test_other_formats(command: Command, kind: str) -> None:
    if missing(kind):
        pytest.skip(f"needs {missing(kind)}: pip install 'unisono[export]'")
    if kind == "aoti" and shutil.which("g++") is None:
        pytest.skip("needs g++")
    trained(command)
    ended = command.run("export", "out", "model", "--format", kind, "--json", times=10)
    assert ended.status == 0, ended.err
    assert last_json(ended.out)["relative"] < 1e-5


TRANSFORMER = """
import torch, unisono
from transformers import GPT2Config, GPT2LMHeadModel

def main(run):
    tokens = torch.randint(0, 50, (64, 12), generator=torch.Generator().manual_seed(0))
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    model = run.place(lambda: GPT2LMHeadModel(config))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(torch.utils.data.TensorDataset(tokens)):
        for (x,) in step:
            step.backward(model(input_ids=x, labels=x).loss, x.numel(), mean=True)
        step.update(optimizer)

if __name__ == "__main__":
    unisono.main(main)
"""


@pytest.mark.slow
def test_a_model_of_transformers_is_a_folder(command: Command) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install 'unisono[huggingface]'")
    command.script(TRANSFORMER)
    assert command.run("run", "script.py", "--run-dir", "out", "--set", "steps=3", "--set", "batch=16").status == 0
    ended = command.run("export", "out", "folder", "--format", "hf", "--json", times=10)
    assert ended.status == 0, ended.err
    assert last_json(ended.out)["relative"] < 1e-6
    found = {path.name for path in (command.folder / "folder").iterdir()}
    assert {"config.json", "model.safetensors", "export.json", "README.md"} <= found
    ended = command.run("export", "out", "model.pt2", "--format", "torch", times=10)
    assert ended.status == 0, ended.err
    found = torch.export.load(command.folder / "model.pt2").module()(input_ids=torch.ones(3, 5, dtype=torch.long))
    assert {name: value.shape for name, value in found.items()} == {"logits": (3, 5, 50)}, "labels are an input"


REFUSED = {
    "branches": ("kind=branches", "Cannot export the Net as a program of torch.export."),
    "random": ("kind=random", "computes other values than the model"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["branches", "random"])
def test_a_model_that_cannot_be_exported_is_refused_with_the_reason(command: Command, name: str) -> None:
    setting, expected = REFUSED[name]
    trained(command, "--set", setting)
    (command.folder / "model.pt2").write_text("mine")
    ended = command.run("export", "out", "model.pt2", "--format", "torch", "--force")
    assert ended.status == 1
    assert expected in ended.err
    assert "--format safetensors" in ended.err
    assert "Traceback" not in ended.err
    assert (command.folder / "model.pt2").read_text() == "mine"
    assert {path.name for path in command.folder.iterdir()} >= {"model.pt2"}
    assert not list(command.folder.glob("*.export.json"))
    assert not list(command.folder.glob(".model*"))


WRONG = {
    "an unknown format": (("--format", "tflite"), "There is no format tflite."),
    "hf of a model of its own": (("--format", "hf"), "It is no model of transformers"),
    "another model": (("--format", "torch", "--model", "generator"), "The run tracks no model 'generator'."),
    "a script that is gone": (("--format", "torch", "--script", "gone.py"), "There is no file gone.py."),
}


@pytest.mark.slow
def test_wrong_requests(command: Command) -> None:
    trained(command)
    for name, (words, expected) in WRONG.items():
        ended = command.run("export", "out", "model", *words)
        assert ended.status != 0, name
        assert expected in ended.err, name
        assert "Traceback" not in ended.err, name
        assert not (command.folder / "model").exists(), name


@pytest.mark.ci
def test_a_damaged_checkpoint_and_an_existing_file(command: Command) -> None:
    trained(command)
    (command.folder / "model.pt2").write_text("mine")
    ended = command.run("export", "out", "model.pt2", "--format", "torch")
    assert (ended.status, "model.pt2 exists." in ended.err) == (2, True)
    assert "--format torch --force" in ended.err
    for file in (command.folder / "out" / "checkpoints").rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    ended = command.run("export", "out", "model.pt2", "--format", "torch", "--force")
    assert ended.status == 1
    assert "Cannot export the model of out." in ended.err
    assert (command.folder / "model.pt2").read_text() == "mine"


@pytest.mark.slow
def test_a_checkpoint_without_a_trusted_signature_is_refused(command: Command) -> None:
    trained(command)
    make = "openssl genpkey -algorithm ed25519 -out private.pem && openssl pkey -in private.pem -pubout -out public.pem"
    subprocess.run(make, shell=True, check=True, cwd=command.folder, capture_output=True)
    ended = command.run("export", "out", "model.pt2", "--format", "torch", "--trust", "public.pem")
    assert (ended.status, "It is not signed" in ended.err) == (1, True), ended.err
    assert not (command.folder / "model.pt2").exists()
    ended = command.run("export", "out", "model.pt2", "--format", "torch", "--sign", "private.pem")
    assert ended.status == 0, ended.err
    assert command.run("verify", "model.pt2", "--key", "public.pem").status == 0


def test_the_fresh_process_uses_nothing_of_unisono(tmp_path: Path) -> None:
    """The program that loads an export again has no import of this library, and runs where there is none."""
    code = "import sys; sys.modules['unisono'] = None; import runpy; runpy.run_path(sys.argv[1])"
    path = Path(__file__).parents[2] / "unisono" / "export" / "load_again.py"
    subprocess.run([sys.executable, "-I", "-c", code, str(path)], check=True, cwd=tmp_path)
