"""`unisono export`: requests that cannot be carried out leave all files as they are. And a ResNet in every format."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.cli.command import Command, last_json
from unisono.cli.compare.program_export import replace_files, replace_folder
from unisono.errors import SettingsError
from unisono.export import formats

SCRIPT = """
from dataclasses import dataclass
import torch
import torch.nn.functional as F
import helper


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    batch: int = 16
    steps: int | None = 6
    fails: bool = False


class Block(torch.nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first = torch.nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = torch.nn.BatchNorm2d(outputs)
        self.second = torch.nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = torch.nn.BatchNorm2d(outputs)
        self.short = torch.nn.Identity()
        if stride > 1:
            self.short = torch.nn.Sequential(torch.nn.Conv2d(inputs, outputs, 1, stride), torch.nn.BatchNorm2d(outputs))

    def forward(self, x):
        out = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(out)) + self.short(x))


class ResNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 1, 1, bias=False), torch.nn.BatchNorm2d(8))
        self.blocks = torch.nn.Sequential(Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2))
        self.head = torch.nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.blocks(torch.relu(self.stem(x))).mean((2, 3)))


def accuracy(output, x, y):
    return (output.argmax(1) == y).sum(), len(y)


def main(run):
    x = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, (x[:, 0, :8].mean((1, 2)) > 0).long() + helper.ZERO)
    model = run.place(ResNet)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data):
        step.run(model, lambda output, x, y: (F.cross_entropy(output, y, reduction="sum"), len(y)))
        step.update(optimizer)
        if run.settings.fails and step.number == 2:
            run.stop()
    if run.settings.fails:
        raise RuntimeError("the disk is full")
    run.log(run.evaluate(model, data, accuracy))


if __name__ == "__main__":
    unisono.main(main, Settings)
"""

NEEDED = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "executorch": ("executorch",),
    "torch": (),
    "aoti": (),
    "safetensors": ("torchao",),
}


def trained(command: Command, *words: str) -> None:
    (command.folder / "helper.py").write_text("ZERO = 0\n")
    command.script(SCRIPT)
    ended = command.run("run", "script.py", "--run-dir", "out", *words, times=3)
    assert "fails" in "".join(words) or ended.status == 0, ended.err


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NEEDED)
def test_a_resnet_in_every_format(command: Command, name: str) -> None:
    for package in NEEDED[name]:
        if find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install {package}")
    if name == "aoti" and shutil.which("g++") is None:
        pytest.skip("needs g++")
    trained(command, "--ranks", "2")
    words = ("--quantize", "int8") if name == "safetensors" else ()
    ended = command.run("export", "out", "model", "--format", name, *words, "--json", times=10)
    assert ended.status == 0, ended.err
    report: dict[str, Any] = last_json(ended.out)
    assert report["relative"] < 1e-5
    assert report["quality"]["exported"]["accuracy"] == pytest.approx(report["quality"]["original"]["accuracy"])
    if name == "executorch":
        assert report["inputs"]["x"][1] == "3" or report["inputs"]["x"][1] == 3
        assert "to 2" in report["inputs"]["x"][0], report["inputs"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_lost(command: Command) -> None:
    """A run that failed is exported; a folder of other files, and a script without its module, are not."""
    trained(command, "--set", "fails=true")
    ended = command.run("export", "out", "model.pt2", "--format", "torch", times=3)
    assert ended.status == 0, ended.err
    text = " ".join(ended.out.split())
    assert "The run has not ended: this is its newest checkpoint." in text
    assert "after step 4" in text
    assert "was not evaluated: the disk is full" in text, text
    mine = command.folder / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("mine")
    before = {path.name for path in command.folder.iterdir()}
    for kind in ("hf", "peft"):
        ended = command.run("export", "out", "mine", "--format", kind, "--force")
        assert (ended.status, "Only an earlier export is replaced." in ended.err) == (2, True), ended.err
    (command.folder / "helper.py").unlink()
    ended = command.run("export", "out", "model.pt2", "--format", "torch", "--force", times=3)
    expected = (
        "Cannot export the model of out: its script fails.\n  ModuleNotFoundError: No module named 'helper'\n  Next: "
    )
    assert (ended.status, expected in ended.err) == (1, True), ended.err
    assert "unisono export out model.safetensors" in ended.err
    assert "Traceback" not in ended.err
    assert (mine / "thesis.tex").read_text() == "mine"
    assert torch.export.load(command.folder / "model.pt2").module()(torch.ones(5, 3, 16, 16)).shape == (5, 4)
    assert {path.name for path in command.folder.iterdir()} == before - {"helper.py"}


@pytest.mark.parametrize("name", ["executorch", "gguf", "onnx", "hf", "peft"])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(formats, "find_spec", lambda package: None)
    with pytest.raises(
        SettingsError, match=rf"--format {name} needs packages that are not installed.[^$]*pip install '"
    ):
        formats.require_format(name, "unisono export out model")


def test_an_earlier_export_is_replaced_as_a_whole(tmp_path: Any) -> None:
    new, out = tmp_path / "new", tmp_path / "out"
    for folder in (new, out):
        folder.mkdir()
        (folder / folder.name).write_text("")
    replace_folder(new, out)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["out", "out/new"]
    with pytest.raises(FileNotFoundError):
        replace_folder(new, out)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["out", "out/new"]


def test_files_are_replaced_together(tmp_path: Any) -> None:
    """A disk that becomes full after the program was copied leaves the earlier program and its report."""
    (tmp_path / "new").write_bytes(b"program")
    (tmp_path / "model").write_bytes(b"earlier")
    contents = {tmp_path / "model": tmp_path / "new", tmp_path / "report": "text", tmp_path / "gone" / "card": "text"}
    with pytest.raises(FileNotFoundError):
        replace_files(contents)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "new"]
    assert (tmp_path / "model").read_bytes() == b"earlier"
    replace_files({tmp_path / "model": tmp_path / "new", tmp_path / "report": "text"})
    assert (tmp_path / "model").read_bytes() == b"program"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "new", "report"]
