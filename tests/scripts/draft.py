"""A script during its generation: random numbers, lines of code and traits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Script(NamedTuple):
    """A generated script.

    Args:
        text: The source code of the file.
        traits: Features, by the names that placements.py and KNOWN use.
        broken: The intended violation of the contract of the loop; "" if there is none.
        words: Settings for the command line of each run.
    """

    seed: int
    text: str
    traits: frozenset[str]
    broken: str
    virtual_ranks: int
    steps: int
    words: tuple[str, ...]


class Draft:
    """Makes random choices from a seed, and collects lines of code.

    Args:
        left_out: Traits that are not chosen.
    """

    def __init__(self, seed: int, left_out: Collection[str]) -> None:
        self.seed = seed
        self.random = Random(f"script {seed}")
        self.left_out = left_out
        self.traits: set[str] = set()
        self.settings: dict[str, str] = {}
        """Fields of the settings class: name to "type = value"."""
        self.words: list[str] = []
        """Settings for the command line, as compress.kind=int8."""
        self.top: list[str] = []
        """Definitions above `main`."""
        self.dtype = "float32"
        self.names: dict[str, int] = {}

    def pick(self, choices: Sequence[T]) -> T:
        return self.random.choice(choices)

    def often(self, **weights: float) -> str:
        """Choose one of the names by weight."""
        return self.random.choices(list(weights), list(weights.values()))[0]

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def may(self, trait: str, share: float) -> bool:
        """Choose with this probability whether the script has a trait, unless it is left out."""
        drawn = self.random.random() < share and trait not in self.left_out
        if drawn:
            self.traits.add(trait)
        return drawn

    def name(self, stem: str) -> str:
        """Return an unused name: norm, norm2, norm3."""
        self.names[stem] = self.names.get(stem, 0) + 1
        return stem if self.names[stem] == 1 else f"{stem}{self.names[stem]}"

    def define(self, block: str) -> None:
        """Add a definition, unless it exists."""
        block = block.strip("\n")
        if block not in self.top:
            self.top.append(block)


class Net:
    """The class of a model during its generation. Each line of its `forward` maps x to x."""

    def __init__(self, draft: Draft, name: str) -> None:
        self.draft, self.name = draft, name
        self.init: list[str] = []
        self.forward: list[str] = []

    def add(self, stem: str, expression: str) -> str:
        """Add an attribute, and return the expression that reads it."""
        name = self.draft.name(stem)
        self.init.append(f"self.{name} = {expression}")
        return f"self.{name}"

    def then(self, *lines: str) -> None:
        self.forward += lines

    def source(self, output: str = "x") -> str:
        lines = [f"class {self.name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in self.init]
        lines += ["", "    def forward(self, x):"]
        lines += [f"        {line}" for line in (*self.forward, f"return {output}")]
        return "\n".join(lines)
