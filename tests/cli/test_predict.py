"""`unisono predict`: the outputs of a run's model for other data, on any number of processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import wave
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.command import Command, last_json
from unisono.recipes.datasets.images import load_digits

SCRIPT = '''
import os, time
from pathlib import Path
import torch
import torch.nn.functional as F
import unisono


class Net(torch.nn.Module):
    """Batch norm, dropout, and two inputs."""

    def __init__(self):
        super().__init__()
        self.enter = torch.nn.Linear(4, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout(0.5)
        self.leave = torch.nn.Linear(8, 3)

    def forward(self, x, scale=None):
        x = self.leave(self.drop(torch.relu(self.norm(self.enter(x)))))
        return x if scale is None else {"logits": x * scale[:, None], "plain": [x, x.argmax(-1)]}


def main(run):
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    model = run.place(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y, reduction="sum"), len(y))
        step.update(optimizer)


def predict(settings, model, path):
    """Read a number from each line, and wait where a file says so."""
    lines = [float(line) for line in path.read_text().splitlines()]
    kind, slow = os.environ.get("KIND"), Path("slow").exists()

    def forward(model, batch):
        if slow:
            time.sleep(0.02)
        return model(batch[:, None] * torch.ones(4))

    if kind == "nothing":
        return lines
    describe = (lambda row: {"class": int(row.argmax()), "row": row}) if kind == "tensors" else (
        lambda row: {"class": int(row.argmax()), "logits": row.tolist()})
    return unisono.Prediction(torch.tensor(lines), forward=forward, describe=describe)


if __name__ == "__main__":
    unisono.main(main, unisono.Settings, predict=predict if os.environ.get("KIND") != "without" else None)
'''
RUN = ("run", "script.py", "--run-dir", "out", "--set", "steps=6", "--set", "batch=16")
SAMPLES = 2500


def trained(command: Command, *words: str) -> None:
    command.script(SCRIPT)
    ended = command.run(*RUN, *words)
    assert ended.status == 0, ended.err


def numbers(command: Command, count: int = SAMPLES) -> list[float]:
    values = torch.randn(count, generator=torch.Generator().manual_seed(1)).tolist()
    (command.folder / "data.txt").write_text("".join(f"{value!r}\n" for value in values))
    return values


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [(), ("--ranks", "2", "--set", "parallel.shard=2")],
    ids=["whole", "shards"],
)
def test_the_output_is_the_same_on_any_number_of_processes(command: Command, words: tuple[str, ...]) -> None:
    trained(command, *words)
    values = numbers(command)
    for ranks in (1, 2, 3):
        ended = command.run("predict", "out", "data.txt", f"out-{ranks}.jsonl", "--ranks", str(ranks), "--json")
        assert ended.status == 0, ended.err
        facts = last_json(ended.out)
        assert (facts["samples"], facts["parts"], facts["computed"], facts["step"]) == (SAMPLES, 3, 3, 6)
    one, *others = [(command.folder / f"out-{ranks}.jsonl").read_bytes() for ranks in (1, 2, 3)]
    assert others == [one, one]
    assert command.run("predict", "out", "data.txt", "rows.safetensors", "--ranks", "2").status == 0
    rows = load_file(command.folder / "rows.safetensors")["output"]
    lines = [json.loads(line) for line in one.splitlines()]
    assert [line["logits"] for line in lines] == rows.tolist()
    assert len(lines) == len(values)
    assert not list(command.folder.glob("*.parts"))
    # the weights that were exported, in plain torch
    assert command.run("export", "out", "model.safetensors").status == 0
    plain = """
import torch
from safetensors.torch import load_model, load_file
exec('class Net' + open('script.py').read().split('class Net')[1].split('def main')[0])
net = Net(); load_model(net, 'model.safetensors'); net.eval(); torch.set_grad_enabled(False)
x = torch.tensor([float(line) for line in open('data.txt')])[:, None] * torch.ones(4)
print(float((net(x) - load_file('rows.safetensors')['output']).abs().max()))
"""
    done = subprocess.run([sys.executable, "-c", plain], cwd=command.folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5


@pytest.mark.ci
@pytest.mark.parametrize("end", ["SIGKILL of a process", pytest.param("Ctrl-C", marks=pytest.mark.slow)])
def test_a_stopped_prediction_continues_on_another_number_of_processes(command: Command, end: str) -> None:
    trained(command)
    numbers(command)
    assert command.run("predict", "out", "data.txt", "whole.jsonl").status == 0
    (command.folder / "slow").touch()
    words = [sys.executable, "-m", "unisono", "predict", "out", "data.txt", "again.jsonl"]
    running = subprocess.Popen(
        [*words, "--ranks", "2"], cwd=command.folder, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    first = command.folder / "again.jsonl.parts" / "00000000.jsonl"
    until = time.monotonic() + 120
    while not first.exists():
        assert running.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    if end == "Ctrl-C":  # which reaches all processes of the terminal
        os.killpg(running.pid, signal.SIGINT)
    workers = [p for p in psutil.Process(running.pid).children(recursive=True) if "script.py" in " ".join(p.cmdline())]
    if end != "Ctrl-C":
        os.kill(workers[-1].pid, signal.SIGKILL)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 1, err
    assert "kept in" in err
    (command.folder / "slow").unlink()
    (command.folder / "other.txt").write_text("1\n")
    ended = command.run("predict", "out", "other.txt", "again.jsonl")
    assert ended.status == 2
    assert "begun by another prediction" in ended.err
    ended = command.run("predict", "out", "data.txt", "again.jsonl", "--ranks", "3", "--json")
    assert ended.status == 0, ended.err
    facts = last_json(ended.out)
    assert 0 < facts["computed"] < facts["parts"] == 3
    assert (command.folder / "again.jsonl").read_bytes() == (command.folder / "whole.jsonl").read_bytes()


@pytest.mark.slow
def test_a_script_without_a_function_predicts_for_tensors(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIND", "without")
    trained(command)
    torch.manual_seed(3)
    inputs = {"x": torch.randn(50, 4), "scale": torch.rand(50)}
    save_file(inputs, command.folder / "inputs.safetensors")
    assert command.run("predict", "out", "inputs.safetensors", "o.safetensors", "--ranks", "2").status == 0
    found = load_file(command.folder / "o.safetensors")
    assert {name: tuple(leaf.shape) for name, leaf in found.items()} == {
        "logits": (50, 3),
        "plain.0": (50, 3),
        "plain.1": (50,),
    }
    assert torch.equal(found["logits"], found["plain.0"] * inputs["scale"][:, None])
    assert command.run("predict", "out", "inputs.safetensors", "o.jsonl").status == 0
    lines = [json.loads(line) for line in (command.folder / "o.jsonl").read_text().splitlines()]
    assert [line["plain"][1] for line in lines] == found["plain.1"].tolist()
    for content, reason in (
        ({"y": torch.ones(2)}, "no argument 'y'"),
        ({"x": torch.ones(2, 4), "scale": torch.ones(3)}, "one row for each sample"),
    ):
        save_file(content, command.folder / "wrong.safetensors")
        ended = command.run("predict", "out", "wrong.safetensors", "wrong.jsonl")
        assert ended.status == 1
        assert reason in ended.err
    numbers(command, 3)
    ended = command.run("predict", "out", "data.txt", "other.jsonl")
    assert "does not say how to predict" in ended.err


@pytest.mark.slow
def test_wrong_requests(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(command)
    numbers(command, 5)
    (command.folder / "old.jsonl").write_text("kept")
    for words, reason in (
        (("nothing", "data.txt", "o.jsonl"), "nothing"),
        (("out", "missing.txt", "o.jsonl"), "There is no file or folder missing.txt"),
        (("out", "data.txt", "o.csv"), "The output is one of .jsonl, .safetensors"),
        (("out", "data.txt", "old.jsonl"), "--force"),
        (("out", "data.txt", "folder/o.jsonl"), "There is no folder folder"),
        (("out", "data.txt", "o.jsonl", "--ranks", "0"), "At least one process"),
    ):
        ended = command.run("predict", *words)
        assert ended.status == 2, ended.err
        assert reason in ended.err
    assert (command.folder / "old.jsonl").read_text() == "kept"
    for kind, reason in (("nothing", "returned no unisono.Prediction"), ("tensors", "cannot be written as JSON")):
        monkeypatch.setenv("KIND", kind)
        ended = command.run("predict", "out", "data.txt", "o.jsonl")
        assert ended.status == 1
        assert reason in ended.err
    monkeypatch.delenv("KIND")
    ended = command.run("predict", "out", "data.txt", "o.jsonl", "--model", "other")
    assert "tracks no model 'other'" in ended.err
    assert command.run("predict", "out", "data.txt", "o.jsonl").status == 0
    assert len((command.folder / "o.jsonl").read_text().splitlines()) == 5


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["topics", "text"])
def test_recipes_predict(command: Command, recipe: str) -> None:
    words = (
        ("--set", "steps=3", "--set", "epochs=none")
        if recipe == "topics"
        else ("--set", "steps=2", "--set", "sample_bytes=0", "--set", "validate_bytes=256")
    )
    ended = command.run("run", recipe, "--run-dir", "out", *words)
    assert ended.status == 0, ended.err
    text = Path(__file__).read_text()
    (command.folder / "data.txt").write_text(text)
    outputs = []
    for ranks in ("1", "2"):
        ended = command.run("predict", "out", "data.txt", f"o{ranks}.jsonl", "--ranks", ranks)
        assert ended.status == 0, ended.err
        outputs.append((command.folder / f"o{ranks}.jsonl").read_text())
    assert outputs[0] == outputs[1]
    rows = [json.loads(line) for line in outputs[0].splitlines()]
    if recipe == "topics":
        assert len(rows) == len(text.splitlines())
        assert all(isinstance(row["topic"], str) and 0 < row["probability"] <= 1 for row in rows)
    else:
        assert sum(row["bytes"] for row in rows) == len(text.encode())
        assert all(0 < row["bits_per_byte"] < 20 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "sets"),
    [("image", ["epochs=4"]), ("supernet", ["epochs=6", "path=3333", "layers=4"])],
    ids=["image", "a path of supernet"],
)
def test_recipes_of_images_predict_for_files(command: Command, recipe: str, sets: list[str]) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install 'unisono[image]'")
    data = load_digits()
    words = [word for each in ["source=digits", *sets] for word in ("--set", each)]
    ended = command.run("run", recipe, "--run-dir", "out", *words)
    assert ended.status == 0, ended.err
    (command.folder / "digits").mkdir()
    labels = data.valid.labels[:60].tolist()
    for number, pixels in enumerate(data.valid.images[:60, 0]):
        image.fromarray(pixels.numpy()).save(command.folder / "digits" / f"{number:03}.png")
    assert command.run("predict", "out", "digits", "o.jsonl", "--ranks", "2").status == 0
    rows = [json.loads(line) for line in (command.folder / "o.jsonl").read_text().splitlines()]
    assert [Path(row["file"]).name for row in rows] == [f"{number:03}.png" for number in range(60)]
    assert sum(int(row["class"]) == label for row, label in zip(rows, labels, strict=True)) > 40
    image.new("RGB", (8, 8)).save(command.folder / "color.png")
    ended = command.run("predict", "out", "color.png", "o2.jsonl")
    assert ended.status == 1
    assert "do not fit the model" in ended.err


LEARNS = ("--set", "augment=0", "--set", "epochs=16")
"""Enough for 40 clips."""


@pytest.mark.slow
def test_the_speech_recipe_predicts_for_files(command: Command) -> None:
    generator = torch.Generator().manual_seed(0)
    for word, hertz in (("low", 300), ("high", 1500)):
        (command.folder / "words" / word).mkdir(parents=True)
        for number in range(20):
            time_, noise = torch.arange(4000) / 8000, torch.randn(4000, generator=generator)
            sound = torch.sin(6.2832 * hertz * time_) * 0.3 + noise * 0.03
            with wave.open(str(command.folder / "words" / word / f"v{number}_{word}.wav"), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(8000)
                file.writeframes((sound * 32767).to(torch.int16).numpy().tobytes())
    ended = command.run("run", "speech", "--run-dir", "out", "--set", "data=words", "--set", "batch=8", *LEARNS)
    assert ended.status == 0, ended.err
    for ranks in ("1", "2"):
        assert command.run("predict", "out", "words", f"o{ranks}.jsonl", "--ranks", ranks).status == 0
    rows = [json.loads(line) for line in (command.folder / "o1.jsonl").read_text().splitlines()]
    assert (command.folder / "o1.jsonl").read_bytes() == (command.folder / "o2.jsonl").read_bytes()
    assert all(row["word"] == Path(row["file"]).parent.name for row in rows)
    assert len(rows) == 40
