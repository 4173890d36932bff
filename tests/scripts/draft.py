"""A script while it is being drawn: its random numbers, its lines, and what is known of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Script(NamedTuple):
    """A drawn script.

    text    its source, a whole file
    traits  what is in it, by names that placements and KNOWN use
    broken  how it breaks the contract of the loop on purpose; "": it is honest
    words   settings that every run of it is given on the command line
    """

    seed: int
    text: str
    traits: frozenset[str]
    broken: str
    virtual_ranks: int
    steps: int
    words: tuple[str, ...]


class Draft:
    """Draws choices from a seed and collects lines.

    left_out  traits that are not drawn
    """

    def __init__(self, seed: int, left_out: Collection[str]) -> None:
        self.seed = seed
        self.random = Random(f"script {seed}")
        self.left_out = left_out
        self.traits: set[str] = set()
        self.settings: dict[str, str] = {}
        """Lines of the class of settings: name -> "type = value"."""
        self.words: list[str] = []
        """Settings for the command line: compress.kind=int8."""
        self.top: list[str] = []
        """Definitions above `main`, one block of lines each."""
        self.dtype = "float32"
        self.names: dict[str, int] = {}

    def pick(self, choices: Sequence[T]) -> T:
        return self.random.choice(choices)

    def often(self, **weights: float) -> str:
        """One of the names, drawn by weight."""
        return self.random.choices(list(weights), list(weights.values()))[0]

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def may(self, trait: str, share: float) -> bool:
        """Draw a trait of the script, unless it is left out."""
        drawn = self.random.random() < share and trait not in self.left_out
        if drawn:
            self.traits.add(trait)
        return drawn

    def name(self, stem: str) -> str:
        """A name that is free: norm, norm2, norm3."""
        self.names[stem] = self.names.get(stem, 0) + 1
        return stem if self.names[stem] == 1 else f"{stem}{self.names[stem]}"

    def define(self, block: str) -> None:
        """Add a definition, once."""
        block = block.strip("\n")
        if block not in self.top:
            self.top.append(block)


class Net:
    """The class of a model while it is being drawn. Its `forward` turns x into x, line by line."""

    def __init__(self, draft: Draft, name: str) -> None:
        self.draft, self.name = draft, name
        self.init: list[str] = []
        self.forward: list[str] = []

    def add(self, stem: str, expression: str) -> str:
        """A member; returns the name to use it by."""
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
