"""Programs for ExecuTorch: models that its parts refuse as they are, loaded by the program that checks every export."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cli.command import last_json
from unisono.errors import LoopError
from unisono.export import load_again
from unisono.export.formats import FORMATS, ExportRequest
from unisono.export.samples import ModelCall
from unisono.export.writers import write_executorch, write_program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("executorch") is None, reason="needs pip install 'unisono[executorch]'"),
    pytest.mark.filterwarnings("ignore"),  # of ExecuTorch and the packages that it imports
]

REQUEST = ExportRequest("executorch")


def written(model: nn.Module, folder: Path, *inputs: Tensor, **named: Tensor) -> dict[str, Any]:
    """Export a model with samples, let a fresh process load it, and return facts of the writer and of that process."""
    torch.manual_seed(0)
    write_program(ExportRequest("executorch", folder=str(folder)), model, ModelCall(inputs, named), evaluates=False)
    command = [sys.executable, "-I", load_again.__file__, "executorch", str(folder / "program.pte"), str(folder), "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    found: dict[str, Any] = last_json(done.stdout)
    return facts | found


class Frames(nn.Module):
    """A convolution over time, for sequences of any number and length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(8, 16, 3, padding=1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.second(torch.relu(self.first(x.transpose(1, 2))).transpose(1, 2))
        return scores


def test_several_free_sizes(tmp_path: Path) -> None:
    """XNNPACK refuses this model: then the operators are portable ones."""
    found = written(Frames(), tmp_path, torch.randn(4, 10, 8))
    assert found["operators"] == "portable"
    free, time, channels = found["inputs"]["x"]
    assert (free.rpartition("to ")[2], time.rpartition("to ")[2], channels) == ("4)", "10)", "8")
    assert found["relative"] < 1e-5
    call = load_again.load_executorch(str(tmp_path / "program.pte"))
    assert [each.shape for each in call(torch.randn(3, 7, 8))] == [(3, 7, 4)]


def test_weights_in_channels_last(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2))
    for weight in model.parameters():
        if weight.dim() == 4:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
            assert not weight.is_contiguous()
    found = written(model, tmp_path, torch.randn(4, 3, 12, 12))
    assert (found["operators"], found["relative"] < 1e-5) == ("XNNPACK", True)


def test_an_adapter_is_merged(tmp_path: Path) -> None:
    for package in ("transformers", "peft"):
        pytest.importorskip(package, reason="needs pip install 'unisono[adapters]'")
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    adapter = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model: nn.Module = get_peft_model(LlamaForCausalLM(config), adapter)
    found = written(model, tmp_path, input_ids=torch.randint(0, 32, (4, 6)))
    assert (found["class"], found["merged"], found["relative"] < 1e-5) == ("LlamaForCausalLM", ["default"], True)


BAGS: dict[str, Callable[[], nn.EmbeddingBag]] = {
    "mean without padding": lambda: nn.EmbeddingBag(50, 6, mode="mean", padding_idx=0),
    "mean": lambda: nn.EmbeddingBag(50, 6, mode="mean"),
    "sum": lambda: nn.EmbeddingBag(50, 6, mode="sum", padding_idx=3),
}


@pytest.mark.parametrize("name", BAGS)
def test_bags_of_embeddings(tmp_path: Path, name: str) -> None:
    """The runtime has no operator for them. A bag of padding only has the sum and the mean 0."""
    rows = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(0))
    rows[1] = BAGS[name]().padding_idx or 0
    found = written(nn.Sequential(BAGS[name](), nn.Linear(6, 2)), tmp_path, rows)
    assert found["relative"] < 1e-5


@pytest.mark.parametrize("mode", ["max", "offsets"])
def test_an_operator_that_the_runtime_lacks_is_named(tmp_path: Path, mode: str) -> None:
    inputs: tuple[Tensor, ...] = (torch.randint(1, 50, (4, 9)),)
    if mode == "offsets":
        inputs = (torch.randint(1, 50, (9,)), torch.tensor([0, 2, 5]))
    bag = nn.EmbeddingBag(50, 6, mode="max" if mode == "max" else "sum")
    path = tmp_path / "program.pte"
    with pytest.raises(LoopError) as caught:
        write_executorch(bag, ModelCall(inputs, {}), path, REQUEST)
    assert "Cannot export the EmbeddingBag as a program for the runtime of ExecuTorch." in str(caught.value)
    assert "The runtime has no operator aten::_embedding_bag" in str(caught.value)
    assert "--format onnx or torch" in str(caught.value)
    assert not path.exists()
    assert FORMATS["executorch"].suffix == path.suffix
