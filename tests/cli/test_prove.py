"""`unisono prove`: placements that agree pass, the first difference is named, and the measures are correct."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.cli.command import Command, last_json, start
from tests.cli.refused_requests import RequestProblems
from tests.cli.wrong_scripts import text_of
from unisono.cli.commands.prove import LayoutProof, LayoutRow
from unisono.cli.compare.layout_spec import LayoutLine, LayoutSpec, fitting, placement_of
from unisono.cli.compare.tensor_diff import SMALLEST_NORM, Deviation, DumpFile, Limits, compare, distance
from unisono.cli.request.run_options import RunRequest
from unisono.config import CommandLine
from unisono.errors import SettingsError

LINE = CommandLine(("unisono", "prove", "script.py"))

TWO_MODELS = """
import torch, unisono
from torch import nn

def main(run):
    a, b = run.place(lambda: nn.Linear(3, 4)), run.place(lambda: nn.Linear(4, 2))
    of_a, of_b = torch.optim.Adam(a.parameters()), torch.optim.Adam(b.parameters())
    run.track(a=a, b=b, of_a=of_a, of_b=of_b)
    for step in run.steps(torch.utils.data.TensorDataset(torch.arange(60.0).reshape(20, 3))):
        for of in (of_a, of_b):
            for (x,) in step.over(of):
                step.backward(b(a(x)).square().sum(), len(x))
            step.update(of)

unisono.main(main, unisono.Settings)
"""


def prove(
    folder: Path, script: str, placements: Sequence[str], *sets: str, steps: int = 2, tolerance: float = 1e-5
) -> tuple[int, LayoutProof]:
    path = folder / "script.py"
    path.write_text(script)
    request = RunRequest(sets=("steps=9", *sets), json=True)
    proof = LayoutProof(
        script=path,
        threads=1,
        steps=steps,
        tolerance=tolerance,
        request=request,
        line=LINE,
        folder=folder / "proof",
        start=start,
    )
    return proof.run([placement_of(text, LINE) for text in placements], {}), proof


def test_replicas_and_shards_are_equal_to_the_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    placements = ["replicate=2", "shard=2", "shard=2,reshard=step"]
    status, proof = prove(tmp_path, text_of({}), placements)
    assert (status, last_json(capsys.readouterr().out)["agree"]) == (0, True), proof.rows
    for row in proof.rows:
        assert (row.verdict, row.equal, row.loss, row.gradient, row.norm, row.weights) == ("agrees", True, 0, 0, 0, 0)
        assert row.seconds is not None
        assert row.seconds > 0
    whole, half = proof.rows[0].bytes, proof.rows[1].bytes
    assert whole["parameters"] == (3 * 4 + 4 + 4 + 1) * 4
    assert half["parameters"] < whole["parameters"]
    assert proof.rows[2].bytes["gradients"] > half["gradients"], "gathered once per step, they are whole for a while"
    assert not [path for path in (tmp_path / "proof").rglob("*") if path.name == "checkpoints"], "left before the end"


def test_a_gradient_that_depends_on_the_number_of_processes_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss and the gradient of the last layer agree; the gradients behind the hook differ."""
    wrong = {"before": "SEEN.append(run.size)", "forward": "x.register_hook(lambda g: g * (1 + 0.001 * (SEEN[0] > 1)))"}
    status, proof = prove(tmp_path, text_of(wrong), ["shard=2", "replicate=2"])
    text = last_json(capsys.readouterr().out)
    assert (status, text["agree"]) == (1, False)
    assert text["first"]["what"] == "the gradient of first.bias in step 0"
    assert text["first"]["placement"] == "shard=2"
    assert text["first"]["error"] == pytest.approx(0.001, rel=1e-3)
    assert "unisono check script.py" in text["advice"]
    assert [row.verdict for row in proof.rows] == ["differs", "differs"]


def test_errors_within_the_tolerance_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nearly = {"before": "SEEN.append(run.size)", "forward": "x.register_hook(lambda g: g * (1 + 1e-5 * SEEN[0]))"}
    status, proof = prove(tmp_path, text_of(nearly), ["replicate=2"], tolerance=1e-3)
    assert (status, proof.rows[0].equal) == (0, False), last_json(capsys.readouterr().out)
    assert 5e-6 < (proof.rows[0].gradient or 0) < 2e-5


def test_an_inexact_exchange_is_distinguished_from_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, proof = prove(tmp_path, text_of({}), ["replicate=3"], "exchange=allreduce", tolerance=0.0)
    assert (status, proof.rows[0].verdict) == (1, "differs")
    assert "exchange=tree" in last_json(capsys.readouterr().out)["advice"]


def test_low_precision_is_compared_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = prove(tmp_path, text_of({}), ["shard=2"], "parallel.param_dtype=bf16", tolerance=0.0)
    assert (status, last_json(capsys.readouterr().out)["agree"]) == (0, True)
    status, proof = prove(tmp_path, text_of({}), ["shard=2,param_dtype=bf16"])
    assert (status, proof.rows[0].verdict) == (1, "differs")
    advice = last_json(capsys.readouterr().out)["advice"]
    assert "changes the computation" in advice
    assert "--parallel shard=2 --set parallel.param_dtype=bf16" in advice


UNEVEN = """
import torch, unisono
from torch import nn

def squares(output, x):
    return output.square().sum(), len(x)

def main(run):
    model = run.place(lambda: nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 2)))
    optimizer = torch.optim.Adam(p for p in model.parameters() if p.requires_grad)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(torch.utils.data.TensorDataset(torch.arange(60.0).reshape(20, 3))):
        step.run(model, squares)
        step.update(optimizer)

unisono.main(main, unisono.Settings)
"""


def test_memory_of_a_stage_is_compared_with_its_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first stage has 80 parameters, the second has 42."""
    status, proof = prove(tmp_path, UNEVEN, ["pipeline=2"], steps=1)
    (row,) = proof.rows
    assert (status, row.equal, row.bytes["parameters"]) == (0, True, 80 * 4), last_json(capsys.readouterr().out)
    assert row.stretches == [80 / 122, 42 / 122]
    assert (row.share["parameters"], row.share["optimizer"]) == (1.0, 1.0)
    assert row.share["gradients"] < 1.2, "the buffers of an exchange are multiples of 128 bytes"
    assert row.uneven == "its stages hold 66% and 34% of the parameters"
    assert proof.one.uneven == ""


def test_passes_and_several_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, proof = prove(tmp_path, TWO_MODELS, ["shard=2"])
    assert status == 0, last_json(capsys.readouterr().out)
    truth = DumpFile(proof.recording("truth"))
    assert truth.steps == ["step-0", "step-0-pass-1", "step-1", "step-1-pass-1"]
    assert [*truth.files["step-0"]] == ["a.weight", "a.bias"]
    assert [*truth.files["step-0-pass-1"]] == ["b.weight", "b.bias"]
    assert proof.rows[0].equal


def test_dropout_is_the_proposed_cause_if_activations_are_divided(tmp_path: Path) -> None:
    drops = {"make": "pass", "before": "model = run.place(lambda: torch.nn.Sequential(torch.nn.Dropout(0.2), Net()))"}
    script = text_of(drops).replace("    model = run.place(Net)\n", "")
    _, proof = prove(tmp_path, script, ["replicate=2"], steps=1)
    truth = DumpFile(proof.recording("truth"))
    assert truth.main["dropout"] == "0, 0.2"
    first = Deviation("loss", "", 0, 0, 0.1, 1e-6, False)
    assert "The model has dropout (0, 0.2)" in proof._advice(LayoutSpec({"tensor": "2"}), first, truth)
    assert "unisono check" in proof._advice(LayoutSpec({"replicate": "2"}), first, truth)


@pytest.mark.slow
def test_a_failing_placement_shows_its_traceback(command: Command) -> None:
    (command.folder / "fails.py").write_text(text_of({"before": "assert run.size == 1, 'I am alone'"}))
    ended = command.run("prove", "fails.py", "--parallel", "replicate=2", "--set", "steps=9")
    assert ended.status == 1, ended.err
    assert "replicate=2      2  fails" in ended.out
    assert ended.out.splitlines()[-1] == "AssertionError: I am alone"
    assert not (command.folder / "runs").exists()


def test_too_few_steps_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="left its loop before the steps to compare"):
        prove(tmp_path, text_of({"after": "step.update(optimizer); break"}), ["replicate=2"])


# -- measures


def test_distances() -> None:
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 4.0])
    assert distance(a, b) == (3.0, 4.0, 2, False)
    assert distance(b, b.clone()) == (0.0, 4.0, 2, True)
    assert distance(None, None).equal
    assert math.isinf(distance(a, None).apart)
    assert math.isinf(distance(a, torch.zeros(3)).apart)
    assert not distance(torch.tensor([0.0]), torch.tensor([-0.0])).equal, "to the bit"
    nan = torch.tensor([math.nan])
    assert (distance(nan, nan.clone()).apart, distance(nan, nan.clone()).equal) == (0.0, True)
    assert distance(torch.empty(0), torch.empty(0)).equal


def write_dump(folder: Path, **parts: dict[str, torch.Tensor]) -> DumpFile:
    """Write a dump as train/diagnostics/dump.py does, and open it."""
    from safetensors.torch import save_file

    names = {}
    for part, tensors in parts.items():
        part = part.replace("_", "-")
        (folder / "rank-0" / part).mkdir(parents=True)
        for i, (name, tensor) in enumerate(tensors.items()):
            save_file({name: tensor}, folder / "rank-0" / part / f"{i}.safetensors")
        names[part] = [[name, True] for name in tensors]
    main = {"written": names, "losses": [["step-0", 2.0]], "norms": [], "bytes": {}}
    (folder / "rank-0.json").write_text(json.dumps(main))
    return DumpFile(folder)


def test_cancelled_gradients_are_compared_with_the_whole_gradient(tmp_path: Path) -> None:
    large, rest = torch.ones(100), torch.full((1,), 1e-8)
    truth = write_dump(tmp_path / "a", step_0={"large": large, "rest": rest})
    other = write_dump(tmp_path / "b", step_0={"large": large, "rest": -rest})
    (of_large, of_rest) = sorted((e for e in compare(other, truth, Limits()).errors if e.kind == "gradient"), key=str)
    assert of_large.error == 0
    assert of_rest.error == pytest.approx(2e-8 / (SMALLEST_NORM * math.sqrt(100 / 101)), rel=1e-3)
    assert compare(other, truth, Limits()).first is None
    half = write_dump(tmp_path / "c", step_0={"large": large, "rest": rest + 0.5})
    assert str(compare(half, truth, Limits()).first) == "the gradient of rest in step 0", "a mistake is no rounding"


def test_errors_of_weights_are_relative_to_their_change(tmp_path: Path) -> None:
    begin, end = torch.full((4,), 100.0), torch.full((4,), 101.0)
    parts = {"weights_before": {"w": begin}, "weights_after": {"w": end}}
    truth = write_dump(tmp_path / "a", step_0={}, **parts)
    other = write_dump(tmp_path / "b", step_0={}, **{**parts, "weights_after": {"w": begin}})
    (error,) = (e for e in compare(other, truth, Limits()).errors if e.kind == "weights")
    assert error.error == 1.0, "it did not train at all"
    assert error.is_beyond
    gone = write_dump(tmp_path / "c", step_0={}, weights_before=parts["weights_before"], weights_after={})
    assert str(compare(gone, truth, Limits()).first) == "the weights after the last step (w)"


# -- requests


def test_every_placement_that_fits() -> None:
    found = list(fitting())
    assert len(set(map(str, found))) == len(found)
    assert {placement.processes for placement in found} == {2, 4}
    named = {axis for placement in found for axis, size in placement.axes._asdict().items() if size > 1}
    assert named == set(LayoutSpec({}).axes._fields)
    wanted = {"replicate=4", "shard=4,reshard=step", "replicate=2,shard=2", "pipeline=2,schedule=Interleaved1F1B"}
    wanted |= {
        "shard=2,tensor=2",
        "replicate=2,tensor=2",
        "replicate=2,context=2",
        "tensor=2,sequence_parallel=true,loss_parallel=true",
    }
    wanted |= {"replicate=2,pipeline=2", "tensor=2,pipeline=2"}
    assert wanted <= set(map(str, found))


def test_placements_are_parsed() -> None:
    found = placement_of('parallel.shard=2, layer_classes=["A","B"], replicate=3', LINE)
    assert str(found) == 'shard=2,layer_classes=["A","B"],replicate=3'
    assert found.processes == 6
    assert {"parallel.shard=2", "parallel.tensor=1", 'parallel.layer_classes=["A","B"]'} <= set(found.sets)
    assert (found.share("parameters"), found.is_exact) == (0.5, True)
    by_step = placement_of("shard=2,reshard=step,tensor=2", LINE)
    assert (by_step.share("gradients"), by_step.share("optimizer"), by_step.is_exact) == (0.5, 0.25, False)


def test_proposed_commands_change_the_placement() -> None:
    placement = placement_of("shard=16,reshard=step", LINE)
    line = LayoutLine(LINE.flag("--parallel", str(placement)).words, placement)
    assert str(line.in_processes(8)) == "unisono prove script.py --parallel shard=8,reshard=step"
    assert str(line.setting("parallel.reshard=layer")) == "unisono prove script.py --parallel shard=16,reshard=layer"
    assert str(line.setting("batch=4")) == "unisono prove script.py --parallel shard=16,reshard=step --set batch=4"


def test_a_row_is_a_line_of_the_table() -> None:
    row = LayoutRow("shard=2", 2, "differs", loss=0.0, gradient=0.25, worst="w in step 0", weights=1.0, equal=False)
    row.bytes, row.share = {"parameters": 1_640_000, "gradients": 812, "optimizer": 20_000}, {"parameters": 1.1}
    cells = " ".join(row.line(10).split())
    assert cells == "shard=2 2 differs 0 2e-01 1e+00 differ 1.64 MB + 812 B + 20 kB 1.10 w in step 0"


@pytest.mark.parametrize(
    ("words", "message", "do"),
    [
        (["train.py", "--steps", "0"], "At least one step", "unisono prove train.py --steps 3 --set"),
        (["train.py", "--run-dir", "x"], "Every run starts at step 0", "unisono prove train.py"),
        (["train.py", "--tolerance", "2"], "from 0", "unisono prove train.py --tolerance 1e-05 --set"),
        (["nothing.py"], "There is no recipe or script nothing.py.", "unisono prove --help"),
        ([], "needs the name of a recipe, or the path of a script", "unisono prove text\n"),
        (["train.py", "--parallel", "shrad=2"], "nearest name is shard", "unisono prove train.py --parallel shard=2"),
        (["train.py", "--parallel", "shard"], "takes key=value", "unisono prove train.py --parallel shard=2"),
        (["train.py", "--parallel", "shard=-1"], "number of processes", "unisono prove train.py --parallel shard=2"),
        (
            ["train.py", "--parallel", "shard=2,reshard=all"],
            "parallel.reshard takes one of layer, step",
            "unisono prove train.py --parallel shard=2,reshard=layer",
        ),
        (
            ["train.py", "--parallel", "replicate=2", "--parallel", "shard=16"],
            "8 virtual ranks runs on one: 1 to 8 processes",
            "unisono prove train.py --parallel replicate=2 --parallel shard=8 --set steps=9 --json, or",
        ),
    ],
)
def test_wrong_requests(request_problems: RequestProblems, words: list[str], message: str, do: str) -> None:
    problem, *_ = request_problems("prove", *words, "--set", "steps=9")
    assert message in str(problem)
    assert do in f"{problem.remedy}\n"
