"""`unisono export`: one file that plain torch and safetensors read, of any placement's checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file

from tests.checkpoints import save
from tests.cli.command import last_json
from tests.cli.refused_requests import RequestProblems
from tests.ranks.training import MLP, TinyGPT, settings, train
from unisono import SavedWeights
from unisono.checkpoint.load import load, newest
from unisono.cli.main import main
from unisono.config import ParallelSettings
from unisono.export.safetensors_file import without_ties
from unisono.testing import run_ranks


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on two shards, with tied weights, a frozen parameter and an unused one."""
    folder = tmp_path_factory.mktemp("run")
    run_ranks(train, 2, "gpt", settings(steps=3, parallel=ParallelSettings(shard=2)), str(folder))
    return folder


def test_weights_of_shards_load_into_a_whole_model(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model.safetensors"
    assert main(["export", str(trained), str(out), "--json"]) == 0
    facts = last_json(capsys.readouterr().out)
    saved = load(newest(trained, print) or trained).states["model"]
    assert (facts["step"], facts["aliases"], facts["left_out"]) == (3, {"head.weight": "embed.weight"}, [])
    found = load_file(out)
    assert {*found, *facts["aliases"]} == set(saved)
    for name, tensor in found.items():
        assert torch.equal(tensor, saved[name]), name
    with safe_open(out, framework="pt") as file:
        metadata = file.metadata()
    assert main(["fingerprint", str(trained), "--json"]) == 0
    assert metadata["weights_sha256"] == last_json(capsys.readouterr().out)["weights_sha256"] == facts["weights_sha256"]
    assert (metadata["step"], metadata["format"], metadata["head.weight"]) == ("3", "pt", "embed.weight")

    one, other = TinyGPT(), TinyGPT()
    load_model(one, out)
    assert other.load_state_dict(found, strict=False) == (["head.weight"], [])
    for model in (one, other):
        assert model.head.weight is model.embed.weight
        assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_several_models_have_prefixes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = MLP(), torch.nn.Linear(2, 2)
    states = {"one": {**one.state_dict(), "_extra_state": {"count": 3}}, "other": other.state_dict(), "optimizer": {}}
    save(tmp_path, 7, states, {"models": ["one", "other"]}, 2)
    both, alone = tmp_path / "both.safetensors", tmp_path / "alone.safetensors"
    assert main(["export", str(tmp_path), str(both)]) == 0
    assert "Left out, because they are not tensors: one._extra_state" in capsys.readouterr().out
    assert set(load_file(both)) == {f"one.{n}" for n in one.state_dict()} | {"other.weight", "other.bias"}
    checkpoint = tmp_path / "checkpoints" / "step-00000007"
    assert main(["export", str(checkpoint), str(alone), "--model", "other"]) == 0
    load_model(torch.nn.Linear(2, 2), alone)
    capsys.readouterr()
    assert main(["export", str(checkpoint), str(tmp_path / "x"), "--model", "another"]) == 2
    assert "Its models are one, other." in capsys.readouterr().err


def test_tied_tensors_are_written_once() -> None:
    a, b = torch.ones(2), torch.ones(2)
    assert without_ties({"x": a, "y": b, "z": a}) == ({"x": a, "y": b}, {"z": "x"})


def test_existing_files_are_overwritten_only_with_force(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.safetensors"
    save_file({"mine": torch.ones(1)}, out)
    assert main(["export", str(trained), str(out)]) == 2
    text = capsys.readouterr().err
    assert f"{out} exists.\n" in text
    assert f"  Next: unisono export {trained} {out} --force, or: " in text
    assert [*load_file(out)] == ["mine"]
    assert main(["export", str(trained), str(out), "--force"]) == 0
    assert "embed.weight" in load_file(out)


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path, 1, {"model": MLP().state_dict()}, {"models": ["model"]}, 2)
    (path / "state.json").write_text("{}")
    assert main(["export", str(path), str(tmp_path / "m.safetensors")]) == 1
    assert "state.json has 2 bytes instead of" in capsys.readouterr().err
    assert not (tmp_path / "m.safetensors").exists()


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_a_damaged_checkpoint_of_a_run_is_named(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one that is intact is exported. Weights of a run that has not ended say so."""
    monkeypatch.chdir(tmp_path)
    paths = [save(Path("out"), step, {"model": MLP().state_dict()}, {"models": ["model"]}, 2) for step in (1, 2)]
    Path("script.py").write_text("")
    Path("out", "settings.toml").write_text("")
    Path("out", "environment.json").write_text('{"script": "script.py"}')
    (paths[1] / "state.json").write_text("{}")
    note = "The checkpoint after step 2 is damaged and skipped"
    assert main(["fingerprint", "out", "--json"]) == 0
    screen = capsys.readouterr()
    assert note in screen.err
    assert json.loads(screen.out)["step"] == 1
    with pytest.warns(RuntimeWarning, match=note):
        assert SavedWeights("out").path == paths[0]
    if kind == "safetensors":
        assert main(["export", "out", "m.safetensors"]) == 0
        screen = capsys.readouterr()
        assert note in screen.err
        assert screen.out.startswith("The run has not ended: this is its newest checkpoint.\nm.safetensors: ")
        assert "after step 1" in screen.out
    (paths[0] / "state.json").write_text("{}")
    assert main(["export", "out", "m", "--format", kind]) == 1
    text = " ".join(capsys.readouterr().err.split())
    assert note in text
    what = "weights in" if kind == "safetensors" else "model of"
    assert f"Cannot export the {what} out. It has 2 checkpoints, and none is intact: " in text
    assert "Next: restore one of them from a copy." in text
    assert not Path("m").exists()


@pytest.mark.parametrize("name", ["README.md", "README.export.json"])
def test_report_and_card_replace_no_file(
    trained: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text("mine")
    words = ["export", str(trained), str(tmp_path / "README"), "--format", "torch"]
    assert main(words) == 2
    assert f"{name} exists.\n" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    assert main([*words, "--force"]) == 2
    assert f"{name} is a folder.\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message", "do"),
    [
        (["nowhere", "m.safetensors"], "There is no folder nowhere.", "unisono export "),
        ([".", "m.safetensors"], "There is no checkpoint in .", "unisono export "),
        (["RUN", "."], "is a folder", "unisono export RUN model.safetensors"),
        (["RUN", "no/m.safetensors"], "There is no folder no", "mkdir -p no && unisono export RUN no/m.safetensors"),
        (["RUN"], "and the file to write", "unisono export runs/NAME-TIME model.safetensors"),
    ],
)
def test_wrong_requests(
    trained: Path, tmp_path: Path, request_problems: RequestProblems, words: list[str], message: str, do: str
) -> None:
    (tmp_path / "RUN").symlink_to(trained)
    (problem,) = request_problems("export", *words)
    assert message in str(problem)
    assert problem.remedy.startswith(do)
