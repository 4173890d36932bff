"""Loading of settings: the source of every value, and all problems reported together."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import unisono
from unisono.config import CommandLine, flatten, load, provenance_lines, read, result_settings
from unisono.config.validate import check
from unisono.errors import Problem, SettingsError


class Colour(Enum):
    red = 1
    blue = 2


@dataclass(frozen=True, kw_only=True)
class Model:
    width: int = 8
    activation: Literal["relu", "gelu"] = "relu"


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    batch: int = 64
    lr: float = 3e-4
    model: Model = Model()
    data: Path | None = None
    name: str = "first"
    shuffle: bool = True
    shape: tuple[int, int] = (2, 3)
    tags: list[str] = field(default_factory=list)
    colour: Colour = Colour.red
    note: str = field(default="", metadata={"changes_bits": False, "help": "for people"})


def problems_of(*args: Any, **kwargs: Any) -> list[Problem]:
    with pytest.raises(SettingsError) as caught:
        load(*args, **kwargs)
    assert caught.value.exit_status == 2
    assert all(all(part for part in problem) for problem in caught.value.problems), "a part of a message is empty"
    return list(caught.value.problems)


def test_defaults_script_file_and_sets_override_each_other_in_this_order(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text('steps = 5\nlr = 1\nname = "file"\n[model]\nwidth = 16\n[checkpoint]\nevery = 3\n')
    settings, sources = load(Settings, file=file, sets=["lr=3e-4", "model.activation=gelu", "data=/a=b"])
    assert settings.model == Model(width=16, activation="gelu")
    assert (settings.steps, settings.lr, settings.name, settings.checkpoint.every) == (5, 3e-4, "file", 3)
    assert settings.data == Path("/a=b")
    assert sources["seed"] == "default"
    assert sources["batch"] == "script"
    assert sources["model.width"] == str(file)
    assert sources["lr"] == "--set"
    assert list(sources) == list(flatten(settings))


@pytest.mark.parametrize(
    ("request_", "name", "value"),
    [
        ("lr=3e-4", "lr", 3e-4),
        ("lr=1", "lr", 1.0),
        ("steps=1_000", "steps", 1000),
        ("steps=none", "steps", None),
        ("clip=1", "clip", 1.0),
        ("clip=None", "clip", None),
        ("shuffle=false", "shuffle", False),
        ("name=a b", "name", "a b"),
        ("name=", "name", ""),
        ("data=x/y", "data", Path("x/y")),
        ("shape=[4, 5]", "shape", (4, 5)),
        ('tags=["a", "b"]', "tags", ["a", "b"]),
        ("colour=blue", "colour", Colour.blue),
        ("model.width=32", "model.width", 32),
        ("exchange=allreduce", "exchange", "allreduce"),
    ],
)
def test_typed_text_becomes_the_fields_type(request_: str, name: str, value: object) -> None:
    got = flatten(load(Settings, sets=[request_]).settings)[name]
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("request_", "error", "true", "do"),
    [
        ("steps=many", "Invalid value: steps = many", "steps takes a whole number or none.", "--set steps=1"),
        ("steps=1.5", "Invalid value: steps = 1.5", "steps takes a whole number or none.", "--set steps=1"),
        ("lr=fast", "Invalid value: lr = fast", "lr takes a number.", "--set lr=0.0003"),
        ("shuffle=maybe", "Invalid value: shuffle = maybe", "shuffle takes true or false.", "--set shuffle=true"),
        (
            "model.activation=gel",
            "Invalid value: model.activation = gel",
            "model.activation takes one of relu, gelu.",
            "--set model.activation=gelu",
        ),
        ("colour=blu", "Invalid value: colour = blu", "colour takes one of red, blue.", "--set colour=blue"),
        (
            "shape=[1]",
            "Invalid value: shape = [1]",
            "shape takes a list of 2: [a whole number, a whole number].",
            "--set 'shape=[2, 3]'",
        ),
        (
            "precision=bf8",
            "Invalid value: precision = bf8",
            "precision takes one of fp32, bf16, fp16.",
            "--set precision=fp32",
        ),
        ("wdith=3", "There is no setting wdith.", "The nearest name is model.width.", "--set model.width=3"),
        ("width=3", "There is no setting width.", "The nearest name is model.width.", "--set model.width=3"),
        ("batch_size=8", "There is no setting batch_size.", "The nearest name is batch.", "--set batch=8"),
        (
            "modle.width=3",
            "There is no setting modle.width.",
            "The nearest name is model.width.",
            "--set model.width=3",
        ),
        (
            "model=3",
            "model is a section, not a setting.",
            "It has the settings model.width, model.activation.",
            "--set model.width=VALUE",
        ),
        ("seed", "--set seed has no value.", "--set takes key=value.", "--set seed=0"),
    ],
)
def test_a_wrong_set_is_answered_with_the_error_the_facts_and_a_fix(
    request_: str, error: str, true: str, do: str
) -> None:
    assert problems_of(Settings, sets=[request_]) == [Problem(error, true, do)]


def test_an_unknown_name_without_a_neighbour_lists_all_names() -> None:
    (problem,) = problems_of(Settings, sets=["zzzzzz=1"])
    assert "model.width" in problem.facts


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text('lr = "3e-4"\nlearning_rate = 1\nmodel = 3\nsteps = true\n')
    problems = problems_of(Settings, file=file, sets=["a", "steps=x"])
    assert len(problems) == 6
    assert (
        Problem(f'Invalid value: lr = "3e-4" in {file}', "lr takes a number.", f"Write in {file}: lr = 0.0003")
        in problems
    )


@pytest.mark.parametrize(
    "content", [None, b"a = = 1", b"\xff\xfe", "folder"], ids=["missing", "no toml", "no text", "a folder"]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | str | None) -> None:
    file = tmp_path / "settings.toml"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content == "folder":
        file.mkdir()
    (problem,) = problems_of(Settings, file=file)
    assert problem.error == f"Cannot read the settings file {file}."


def test_a_setting_without_a_default_must_be_given() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Needs(unisono.Settings):
        corpus: str

    globals()["Needs"] = Needs
    assert problems_of(Needs) == [Problem("corpus has no default.", "It takes text.", "--set corpus=text")]
    assert load(Needs, sets=["corpus=x"]).settings.corpus == "x"


def test_a_default_of_another_type_than_its_annotation_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Wrong(unisono.Settings):
        depth: int = 2.5  # type: ignore[assignment]
        hook: object = print

    problems = problems_of(Wrong)
    assert [p.error.split()[5] for p in problems] == ["depth", "hook"]


def test_a_class_without_the_dataclass_decorator_is_refused() -> None:
    class Forgot(unisono.Settings):
        batch: int = 64

    (problem,) = problems_of(Forgot)
    assert problem.remedy == "Write @dataclass(frozen=True, kw_only=True) above class Forgot."


def test_a_field_without_a_type_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Wide(Model):
        width = 16

    @dataclass(frozen=True, kw_only=True)
    class Bare(unisono.Settings):
        precision = "bf16"
        unit = 3  # a constant: no setting has this name

    @dataclass(frozen=True, kw_only=True)
    class Inside(unisono.Settings):
        model: Wide = Wide()

    globals()["Wide"] = Wide
    error = "precision = 'bf16' in class Bare has no type annotation."
    true = "Without one it is no field, and precision stays fp32."
    assert problems_of(Bare) == [Problem(error, true, "Write precision: str = 'bf16' there.")]
    (problem,) = problems_of(Inside)
    assert problem.remedy == "Write width: int = 16 there."


def test_a_wider_type_does_not_widen_the_range_of_a_common_setting() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Loose(unisono.Settings):
        precision: str = "bf16"  # type: ignore[assignment]
        batch: float = 16.0  # type: ignore[assignment]
        exchange: str = "alreduce"  # type: ignore[assignment]

    assert [(p.error, p.facts, p.remedy) for p in problems_of(Loose, sets=["precision=banana"])] == [
        ("Invalid value: precision = banana", "precision takes one of fp32, bf16, fp16.", "--set precision=bf16"),
        (
            "Invalid default in the script: batch = 16.0",
            "batch takes a whole number.",
            "Change the default of batch in the script.",
        ),
        (
            "Invalid default in the script: exchange = alreduce",
            "exchange takes one of tree, wide, allreduce, ring, ddp, server, local_sgd.",
            "Change the default of exchange in the script.",
        ),
    ]


def test_a_narrower_type_is_the_scripts_to_choose() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Narrow(unisono.Settings):
        precision: Literal["fp32", "bf16"] = "bf16"
        steps: int = 10
        clip: float = 1

    assert load(Narrow).settings.precision == "bf16"
    trues = [problem.facts for problem in problems_of(Narrow, sets=["precision=fp16", "steps=none", "clip=none"])]
    assert trues == [
        "precision takes one of fp32, bf16.",
        "steps takes a whole number.",
        "clip takes a number.",
    ]


def test_an_error_of_the_settings_class_is_a_wrong_request() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Even(unisono.Settings):
        def __post_init__(self) -> None:
            if self.batch % 2:
                raise ValueError("batch must be even")

    (problem,) = problems_of(Even, sets=["batch=33"])
    assert problem.facts == "ValueError: batch must be even"


def test_eight_virtual_ranks_by_default_but_not_more_than_the_batch() -> None:
    assert load(Settings).settings.virtual_ranks == 8
    assert load(Settings, sets=["batch=3"]).settings.virtual_ranks == 3
    settings = load(Settings, sets=["batch=3", "virtual_ranks=8", "steps=1"]).settings
    assert [p.error for p in check(settings, 1, CommandLine())] == [
        "virtual_ranks = 8 is more than the batch has samples."
    ]


def test_changes_bits_contains_the_settings_that_affect_the_result() -> None:
    values = result_settings(load(Settings, sets=["data=/x", "steps=3"]).settings)
    assert not {"steps", "epochs", "checkpoint.every", "loader.workers", "note"} & set(values)
    assert values["data"] == "/x"
    assert values["shape"] == [2, 3]
    assert values["colour"] == "red"
    expected = {"batch", "micro_batch", "virtual_ranks", "seed", "precision", "clip", "exchange", "threads", "lr"}
    assert expected <= set(values)


@pytest.mark.ci
@given(
    st.text(alphabet=st.characters(exclude_categories=["Cs"])),
    st.floats(allow_nan=False),
    st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"]))),
    st.integers(-(2**63), 2**63 - 1),
)
def test_explain_is_a_settings_file_that_gives_the_same_settings(
    tmp_path_factory: pytest.TempPathFactory, name: str, lr: float, tags: list[str], width: int
) -> None:
    settings = Settings(name=name, lr=lr, tags=tags, model=Model(width=width), data=Path("a#  # b"), steps=None)
    sources = {key: "--set" if key == "lr" else "default" for key in flatten(settings)}
    file = tmp_path_factory.getbasetemp() / "explained.toml"
    file.write_text(provenance_lines(settings, sources), encoding="utf-8")
    assert load(Settings, file=file).settings == settings
    values, origins = read(file)
    assert (values.keys(), origins) == (sources.keys(), sources)
    assert (values["name"], values["lr"], values["steps"]) == (None if name == "none" else name, lr, None)
    assert (values["tags"], values["model.width"], values["data"]) == (tags, width, "a#  # b")


def test_explain_gives_each_value_a_line_with_its_source() -> None:
    text = provenance_lines(*load(Settings, sets=["model.width=32"]))
    lines = [line.split() for line in text.splitlines()]
    assert ["model.width", "=", "32", "#", "--set"] in lines
    assert ["batch", "=", "64", "#", "script"] in lines
    assert ["clip", "=", '"none"', "#", "default"] in lines


def test_requested_steps_replace_the_epochs_of_the_script() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Own(Settings):
        epochs: int | None = 5

    assert (load(Own).settings.steps, load(Own).settings.epochs) == (None, 5)
    settings = load(Own, sets=["steps=3"]).settings
    assert (settings.steps, settings.epochs) == (3, None)
    both = load(Own, sets=["steps=3", "epochs=2"]).settings  # check refuses this
    assert (both.steps, both.epochs) == (3, 2)
