"""Tables: generated orders of known structure, and CSV files with columns of numbers and categories."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unisono import DataError
from unisono.recipes.datasets.table_rows import encode_file, load_table


def test_generated_orders_have_a_known_best_accuracy() -> None:
    table = load_table(rows=4000)
    assert len(table.train.labels) == 3200
    assert table.best is not None
    accuracy, loss = table.best
    assert 0.75 < accuracy < 0.9
    assert 0.3 < loss < 0.5
    assert 0.2 < table.train.labels.double().mean() < 0.6, "neither class is rare"
    assert abs(table.train.numbers.mean()) < 1e-3
    for column, size in enumerate(table.columns.sizes):
        assert int(table.train.categories[:, column].max()) < size
    assert load_table(rows=4000).digest == table.digest != load_table(rows=4000, seed=2).digest
    assert "categories product (200), shop (60)" in table.summary()


def write(path: Path, rows: list[str]) -> Path:
    path.write_text("\n".join(["color,size,weight,kind", *rows]) + "\n", encoding="utf-8")
    return path


def test_columns_of_a_file(tmp_path: Path) -> None:
    colors = ["red", "green", "blue"]
    rows = [f"{colors[i % 3]},{i},{'' if i == 5 else i / 2},{'ab'[i % 2]}" for i in range(60)]
    table = load_table(write(tmp_path / "table.csv", [*rows, "purple,1,1,a"]))
    assert table.columns.categories == {"color": {"blue": 1, "green": 2, "red": 3}}
    assert list(table.columns.numbers) == ["size", "weight"]
    assert sorted(set(torch.cat((table.train.categories, table.valid.categories)).flatten().tolist())) == [0, 1, 2, 3]
    assert table.classes == ("a", "b")
    assert len(table.train.labels) + len(table.valid.labels) == 61
    assert torch.isfinite(table.train.numbers).all()
    assert table.best is None
    other = load_table(tmp_path / "table.csv", target="color")
    assert other.classes == ("blue", "green", "purple", "red")
    assert list(other.columns.categories) == ["kind"]


@pytest.mark.parametrize(
    ("rows", "target", "words"),
    [
        (["red,1,2,a", "red,1,2,b"], "shape", "has no column 'shape'.*color, size, weight, kind"),
        (["red,1,2,a", "red,1,2"], "", "Line 3 of .* does not fit"),
        (["red,1,2,a", "red,1,2,b,c"], "", "Line 3 of .* does not fit"),
        (["red,1,2,a", "blue,1,2,a"], "", "has 1 classes"),
        ([], "", "has 0 classes"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, rows: list[str], target: str, words: str) -> None:
    with pytest.raises(DataError, match=f"(?s){words}"):
        load_table(write(tmp_path / "table.csv", rows), target)


def test_rows_of_another_file(tmp_path: Path) -> None:
    table = load_table(write(tmp_path / "table.csv", [f"{'rg'[i % 2]},{i},{i},{'ab'[i % 2]}" for i in range(40)]))
    (tmp_path / "more.csv").write_text("weight,size,color\n3,,g\n4,1,violet\n", encoding="utf-8")
    lines, rows = encode_file(tmp_path / "more.csv", table.columns)
    assert lines[1] == {"weight": "4", "size": "1", "color": "violet"}
    assert rows.categories.tolist() == [[1], [0]]
    assert rows.numbers[0, 0] == 0, "a missing number is the mean"
    mean, std = table.columns.numbers["weight"]
    assert rows.numbers[0, 1].item() == pytest.approx((3 - mean) / std)
    (tmp_path / "more.csv").write_text("weight,size,color\n3,big,g\n", encoding="utf-8")
    with pytest.raises(DataError, match="Its value of size is 'big'"):
        encode_file(tmp_path / "more.csv", table.columns)
    (tmp_path / "more.csv").write_text("weight,color\n3,g\n", encoding="utf-8")
    with pytest.raises(DataError, match="It lacks size"):
        encode_file(tmp_path / "more.csv", table.columns)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Cannot read"):
        load_table(tmp_path / "none.csv")
