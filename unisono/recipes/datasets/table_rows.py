"""Rows with categories and numbers, and a class to predict: generated orders of known structure, or a user's CSV file.

Orders of a shop chain: which of them are returned? The probability follows from the product, the shop, the weekday, the
group of customers, price, delivery days and quantity. Product and shop act together: a product that is returned in one
shop is kept in another, by the product of two hidden vectors. So one knows the best accuracy that a model can reach.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from unisono import DataError
from unisono.recipes.datasets.held_out import held_out

VALID_SHARE = 0.2
"""The fraction of the rows for validation."""
RAREST = 2
"""Rows of a category of a CSV file in the training data; rarer ones count as one category, number 0."""
MISSING = ("", "?", "NA", "NaN", "nan", "null", "None")
"""Values of a CSV file that stand for none."""

_HASH_KEY = "unisono: table rows"


class Rows(NamedTuple):
    """Rows with their classes."""

    categories: Tensor
    """int64 [rows, columns], numbers of categories"""
    numbers: Tensor
    """float32 [rows, columns], with mean 0 and standard deviation 1 in the training data"""
    labels: Tensor
    """int64 [rows], numbers of classes"""

    def dataset(self) -> TensorDataset:
        """Return the rows as a data set of torch."""
        return TensorDataset(*self)


@dataclass(frozen=True)
class Columns:
    """The columns of a table without the one to predict, and how values become numbers."""

    categories: dict[str, dict[str, int]]
    """For each column of categories, the numbers of its categories, from 1. Number 0 stands for all others."""
    numbers: dict[str, tuple[float, float]]
    """For each column of numbers, mean and standard deviation in the training data."""

    @property
    def sizes(self) -> list[int]:
        """The number of categories of each column, that of the others included."""
        return [len(known) + 1 for known in self.categories.values()]

    def encode(self, lines: Sequence[Mapping[str, str]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return categories and scaled numbers of rows, [rows, columns]. A number that is missing gets the mean."""
        codes = [[known.get(line[name], 0) for name, known in self.categories.items()] for line in lines]
        values = [
            [
                0.0 if line[name] in MISSING else (float(line[name]) - mean) / std
                for name, (mean, std) in self.numbers.items()
            ]
            for line in lines
        ]
        return (
            np.array(codes, dtype=np.int64).reshape(len(lines), len(self.categories)),
            np.array(values, dtype=np.float32).reshape(len(lines), len(self.numbers)),
        )


@dataclass(frozen=True)
class Table:
    """Rows for training and validation."""

    name: str
    license: str
    columns: Columns
    classes: tuple[str, ...]
    train: Rows
    valid: Rows
    digest: str
    """The first 12 digits of the sha256 over all rows: equal digests, equal data."""
    best: tuple[float, float] | None = None
    """Accuracy and loss (nats) of the best possible model on the rows for validation, if the structure is known."""

    def summary(self) -> str:
        """Return name, size, license and digest, in one line."""
        categories = ", ".join(f"{name} ({len(known)})" for name, known in self.columns.categories.items())
        return (
            f"{self.name}: {len(self.train.labels):,} rows for training, {len(self.valid.labels):,} for validation, "
            f"categories {categories or 'none'}, numbers {', '.join(self.columns.numbers) or 'none'}, "
            f"{len(self.classes)} classes, license {self.license}, digest {self.digest}"
        )


def load_table(data: Path | None = None, target: str = "", rows: int = 30_000, seed: int = 1) -> Table:
    """Load a table.

    Args:
        data: a CSV file with a line of names. None: generated orders.
        target: the column to predict; empty: the last one.
        rows: of generated orders.
        seed: of generated orders.

    Raises:
        DataError: the file cannot be read, lacks the column, or has fewer than two classes.
    """
    return generate_orders(rows, seed) if data is None else read_csv(data, target)


# -- generated orders


def generate_orders(rows: int, seed: int) -> Table:
    """Draw orders, and whether each is returned. The last fifth is for validation."""
    rng = np.random.Generator(np.random.PCG64(seed))
    sizes = {"product": 200, "shop": 60, "group": 8, "weekday": 7}
    hidden = [rng.standard_normal((sizes[name], 3)) for name in ("product", "shop")]
    of_product, of_weekday = rng.standard_normal(sizes["product"]), rng.standard_normal(sizes["weekday"])
    of_group = rng.standard_normal(sizes["group"])
    frequency = 1 / np.arange(3, sizes["product"] + 3)  # some products are ordered often, most of them are not
    product = rng.choice(sizes["product"], rows, p=frequency / frequency.sum())
    shop, group, weekday = (rng.integers(0, sizes[name], rows) for name in ("shop", "group", "weekday"))
    log_price = rng.normal(3.0, 0.8, rows)
    days = rng.integers(1, 15, rows).astype(np.float64)
    quantity = rng.geometric(0.5, rows).astype(np.float64)
    logits = (
        1.2 * (hidden[0][product] * hidden[1][shop]).sum(1)
        + 0.6 * of_product[product]
        + 0.4 * of_weekday[weekday]
        + 0.8 * of_group[group] * (log_price - 3.0)
        + 0.8 * np.sin(days / 2)
        - 0.2 * quantity
    )
    chance = 1 / (1 + np.exp(-logits))
    returned = (rng.random(rows) < chance).astype(np.int64)
    first = rows - round(VALID_SHARE * rows)
    true = np.clip(chance[first:], 1e-12, 1 - 1e-12)
    surprise = -np.where(returned[first:] == 1, np.log(true), np.log(1 - true))
    numbers = {"log_price": log_price, "days": days, "quantity": quantity}
    columns = Columns(
        {name: {str(i): i + 1 for i in range(size)} for name, size in sizes.items()},
        {name: _scale(values[:first]) for name, values in numbers.items()},
    )
    codes = np.stack((product, shop, group, weekday), 1) + 1
    scaled = np.stack([(numbers[name] - mean) / std for name, (mean, std) in columns.numbers.items()], 1)
    is_valid = np.arange(rows) >= first
    best = float(np.mean((true > 0.5) == (returned[first:] == 1))), float(surprise.mean())
    data = codes, scaled.astype(np.float32), returned
    return _divided("generated orders", "none", columns, ("kept", "returned"), data, is_valid, best)


def _scale(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return mean and standard deviation of the numbers that there are, the latter above 0."""
    found = values[np.isfinite(values)]
    return (float(found.mean()), max(float(found.std()), 1e-9)) if len(found) else (0.0, 1.0)


# -- a user's file


def read_csv(path: Path, target: str) -> Table:
    """Read a CSV file. A column of which every value is a number has numbers, any other has categories."""
    names, lines = read_lines(path)
    target = target or (names[-1] if names else "")
    if target not in names:
        fact = f"Its columns are {', '.join(names)}." if names else "It has no rows."
        raise DataError(f"{path} has no column {target!r}.", fact, f"--set target={names[-1] if names else 'NAME'}")
    lines = [line for line in lines if line[target] not in MISSING]
    classes = tuple(sorted({line[target] for line in lines}))
    if len(classes) < 2:
        fact = f"It has {len(classes)} classes."
        raise DataError(f"The column {target!r} of {path} cannot be predicted.", fact, "--set target=NAME")
    keys = [f"{i} {sorted(line.items())}" for i, line in enumerate(lines)]
    held = held_out(keys, VALID_SHARE, _HASH_KEY)
    is_valid = np.array([key in held for key in keys])
    train = [line for line, held_back in zip(lines, is_valid, strict=True) if not held_back]
    columns = Columns({}, {})
    for name in names:
        if name == target:
            continue
        if all(line[name] in MISSING or _is_number(line[name]) for line in lines):
            values = [np.nan if line[name] in MISSING else float(line[name]) for line in train]
            columns.numbers[name] = _scale(np.array(values))
        else:
            counts = Counter(line[name] for line in train)
            frequent = sorted(value for value, count in counts.items() if count >= RAREST)
            columns.categories[name] = {value: number for number, value in enumerate(frequent, 1)}
    labels = np.array([classes.index(line[target]) for line in lines])
    return _divided(f"rows of {path}", "your own", columns, classes, (*columns.encode(lines), labels), is_valid)


def read_lines(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the names of the columns of a CSV file, and its rows."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            lines = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"Cannot read {path}.", f"{error}.", "a CSV file in UTF-8, with names in its first line."
        ) from None
    names = list(reader.fieldnames or ())
    for number, line in enumerate(lines, 2):
        if None in line or None in line.values():
            fact = f"The first line has {len(names)} names, and this one has another number of values."
            raise DataError(f"Line {number} of {path} does not fit.", fact, "quote values with a comma in them.")
    return names, lines


def encode_file(path: Path, columns: Columns) -> tuple[list[dict[str, str]], Rows]:
    """Read the rows of another CSV file with the columns of a table, and return them with 0 as their labels.

    Raises:
        DataError: the file lacks a column, or has a value that is no number in a column of numbers.
    """
    names, lines = read_lines(path)
    if lacking := [name for name in (*columns.categories, *columns.numbers) if name not in names]:
        fact = f"It lacks {', '.join(lacking)}."
        raise DataError(f"The columns of {path} do not fit the model.", fact, "the columns of the training data.")
    for number, line in enumerate(lines, 2):
        for name in columns.numbers:
            if line[name] not in MISSING and not _is_number(line[name]):
                fact = f"Its value of {name} is {line[name]!r}, and the model was trained with numbers."
                raise DataError(f"Line {number} of {path} does not fit the model.", fact, "a number, or nothing.")
    codes, numbers = columns.encode(lines)
    return lines, Rows(torch.tensor(codes), torch.tensor(numbers), torch.zeros(len(lines), dtype=torch.int64))


def _is_number(value: str) -> bool:
    try:
        return math.isfinite(float(value))
    except ValueError:
        return False


def _divided(
    name: str,
    license_: str,
    columns: Columns,
    classes: tuple[str, ...],
    data: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int64]],
    is_valid: npt.NDArray[np.bool_],
    best: tuple[float, float] | None = None,
) -> Table:
    """Divide the rows (categories, numbers, labels) into training and validation."""
    digest = hashlib.sha256()
    for array in (*data, is_valid):
        digest.update(np.ascontiguousarray(array).tobytes())
    train, valid = (Rows(*(torch.tensor(array[chosen]) for array in data)) for chosen in (~is_valid, is_valid))
    return Table(name, license_, columns, classes, train, valid, digest.hexdigest()[:12], best)
