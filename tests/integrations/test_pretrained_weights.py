"""Pretrained models under every placement: the weights of from_pretrained, read in parts, and written back."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs pip install 'unisono[hf]'")

import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.integrations.small_models import Sentences, collate, llama_config, make_llama, make_tokenizer
from tests.ranks.loops import SETTINGS, attempt
from unisono import SavedWeights
from unisono.config import ParallelSettings
from unisono.environment import World
from unisono.errors import CheckpointError
from unisono.integrations.transformers import PretrainedWeights, generate_texts, save_pretrained
from unisono.testing import run_ranks
from unisono.train.run import Run

PLACEMENTS: dict[str, dict[str, Any]] = {
    "replicas": {},
    "shards": {"shard": 2},
    "shards by step": {"shard": 2, "reshard": "step"},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
}


def place_and_write(run: Run[Any], base: Path, out: Path) -> Any:
    model: Any = PretrainedWeights(base).place(run)
    run.track(model=model)
    save_pretrained(run, model, out, make_tokenizer(), most_bytes=8000)
    return run.context.state.fingerprint()


def place_all(world: World, folder: Path, base: Path) -> dict[str, Any]:
    """Place the model in each way, in one process, because importing transformers takes seconds."""
    names = PLACEMENTS if world.size > 1 else ["replicas"]
    return {
        name: attempt(
            world,
            folder / name,
            partial(place_and_write, base=base, out=folder / name / "out"),
            replace(SETTINGS, parallel=ParallelSettings(**PLACEMENTS[name])),
        )
        for name in names
    }


def place_whole(run: Run[Any], base: Path) -> Any:
    model = run.place(lambda: AutoModelForCausalLM.from_pretrained(base))
    run.track(model=model)
    return run.context.state.fingerprint()


@pytest.mark.ci
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_placement_has_the_weights_of_from_pretrained(tmp_path: Path, tied: bool) -> None:
    base = make_llama(tmp_path / "base", shard_size="6KB", tie_word_embeddings=tied)
    assert len(list(base.glob("model-*.safetensors"))) > 2
    (whole,) = run_ranks(attempt, 1, tmp_path / "whole", partial(place_whole, base=base))
    one, *two = [*run_ranks(place_all, 1, tmp_path / "1", base), *run_ranks(place_all, 2, tmp_path / "2", base)]
    assert one == {"replicas": whole}
    assert two == [dict.fromkeys(PLACEMENTS, whole)] * 2
    expected = AutoModelForCausalLM.from_pretrained(base).state_dict()
    for out in (tmp_path / "1" / "replicas" / "out", *(tmp_path / "2" / name / "out" for name in PLACEMENTS)):
        found = AutoModelForCausalLM.from_pretrained(out)
        assert all(torch.equal(found.state_dict()[name], value) for name, value in expected.items())
        assert len(list(out.glob("model-*.safetensors"))) > 1
        assert len(transformers.AutoTokenizer.from_pretrained(out)) == 40


def build(folder: Path, kind: Any = AutoModelForCausalLM, **changes: Any) -> tuple[Any, PretrainedWeights]:
    """Build a model in this process and fill it, without a run."""
    source = PretrainedWeights(folder, kind, **changes)
    model = source.build()
    for name, value in source.values_for(model).items():
        with torch.no_grad():
            model.state_dict()[name].copy_(value.whole())
    return model, source


def test_a_head_that_the_files_lack_is_new_and_named(tmp_path: Path) -> None:
    model, source = build(make_llama(tmp_path), AutoModelForSequenceClassification, num_labels=3)
    assert source.report.missing == ["score.weight"]
    assert source.report.unexpected == ["lm_head.weight"]
    assert [line.split(":")[0] for line in source.report.lines()] == [
        "new, because the files do not have them",
        "not used, because the model does not have them",
    ]
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3).state_dict()
    ours = model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if name != "score.weight")
    assert 0 < float(ours["score.weight"].std()) < 0.1


def test_names_without_the_prefix_of_the_base_model(tmp_path: Path) -> None:
    transformers.LlamaModel(llama_config()).save_pretrained(tmp_path)
    model, source = build(tmp_path)
    assert source.report.missing == ["lm_head.weight"]
    theirs = transformers.LlamaModel.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(model.model.state_dict()[name], value) for name, value in theirs.items())


@pytest.mark.parametrize("equal", [True, False])
def test_tied_weights_that_the_files_have_twice(tmp_path: Path, equal: bool) -> None:
    make_llama(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() + (0 if equal else 1)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model, source = build(tmp_path)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == equal
    assert ("lm_head.weight" in source.report.tied) == equal
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in theirs.items())


@pytest.mark.parametrize("dtype", ["auto", torch.float32, "bfloat16"])
def test_dtypes(tmp_path: Path, dtype: Any) -> None:
    transformers.LlamaForCausalLM(llama_config()).bfloat16().save_pretrained(tmp_path)
    model, _ = build(tmp_path, dtype=dtype)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()
    ours = model.state_dict()
    assert {name: value.dtype for name, value in ours.items()} == {name: v.dtype for name, v in theirs.items()}
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def cut_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}', encoding="utf-8")


def outside(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    index["weight_map"]["lm_head.weight"] = "../model.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def lose_tensor(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    index["weight_map"]["other.weight"] = next(iter(index["weight_map"].values()))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def lose_file(folder: Path) -> None:
    next(iter(sorted(folder.glob("model-*.safetensors")))).unlink()


def cut_file(folder: Path) -> None:
    file = next(iter(sorted(folder.glob("model-*.safetensors"))))
    file.write_bytes(file.read_bytes()[:-100])


def lose_all(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_index, "no weight_map"),
        (outside, "no file of this folder"),
        (lose_tensor, "'other.weight'"),
        (lose_file, "No such file"),
        (cut_file, "model-00001-of"),
        (lose_all, "There are no weights"),
    ],
)
def test_damaged_folders_are_named(tmp_path: Path, damage: Any, words: str) -> None:
    make_llama(tmp_path, shard_size="6KB")
    damage(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        PretrainedWeights(tmp_path)
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_another_shape_is_refused(tmp_path: Path) -> None:
    source = PretrainedWeights(make_llama(tmp_path), intermediate_size=24)
    with pytest.raises(CheckpointError, match=r"gate_proj.weight \[32, 16\] instead of \[24, 16\]"):
        source.build()


def test_a_cache_of_links_is_read(tmp_path: Path) -> None:
    """The cache of huggingface_hub has links to files that are named by their hashes."""
    make_llama(tmp_path / "plain", shard_size="6KB")
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1a2b"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted((tmp_path / "plain").iterdir())):
        shutil.move(file, blobs / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    assert build(snapshot)[1].report.missing == []


def test_saved_weights_read_the_same_folders(tmp_path: Path) -> None:
    one = SavedWeights(make_llama(tmp_path / "one"))
    several = SavedWeights(make_llama(tmp_path / "several", shard_size="6KB"))
    assert one.sha256 == several.sha256
    model = several.load(transformers.LlamaForCausalLM(llama_config()))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "one").state_dict()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in theirs.items())


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft calls the older name
def test_a_wrap_that_uses_weights_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs pip install 'unisono[adapters]'")
    source = PretrainedWeights(make_llama(tmp_path))
    plain = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = source.build(lambda built: peft.get_peft_model(built, plain))
    names = source.values_for(model)
    assert "base_model.model.lm_head.modules_to_save.default.weight" in names
    assert not any("lora" in name for name in names)
    pissa = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights="pissa")
    with pytest.raises(CheckpointError, match="not read yet"):
        source.build(lambda built: peft.get_peft_model(built, pissa))


def generate(run: Run[Any], base: Path) -> Any:
    tokenizer = make_tokenizer()
    model: Any = PretrainedWeights(base).place(run)

    def left(samples: list[Any]) -> dict[str, torch.Tensor]:
        kept = [{name: each[name] for name in ("input_ids", "attention_mask")} for each in samples]
        return dict(tokenizer.pad(kept, return_tensors="pt", padding_side="left"))

    greedy = generate_texts(run, model, Sentences(9), tokenizer, collate_fn=left, max_new_tokens=8)
    drawn = generate_texts(run, model, Sentences(9), tokenizer, collate_fn=left, max_new_tokens=8, do_sample=True)
    return greedy, drawn


@pytest.mark.ci
def test_generated_texts_do_not_depend_on_the_placement(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    (reference,) = run_ranks(attempt, 1, tmp_path / "1", partial(generate, base=base))
    assert not isinstance(reference, str), reference
    placements: list[dict[str, Any]] = [{}, {"shard": 2}]
    for parallel in placements:
        settings = replace(SETTINGS, parallel=ParallelSettings(**parallel))
        folder = tmp_path / str(parallel)
        assert run_ranks(attempt, 2, folder, partial(generate, base=base), settings) == [reference] * 2
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    tokenizer = make_tokenizer()
    for i, text in enumerate(reference[0]):
        batch = collate([Sentences(9)[i]])
        del batch["labels"]
        found = model.generate(**batch, max_new_tokens=8)[:, batch["input_ids"].shape[1] :]
        assert tokenizer.batch_decode(found, skip_special_tokens=True) == [text]
    assert reference[0] != reference[1]
