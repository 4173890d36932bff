"""A verified step, and this process's records of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.train.verification.gradient_sums import GradientSums
from unisono.train.verification.pass_record import PassRecord


@dataclass
class CheckedStep:
    """A verified step, on this process.

    turn    increases from one verified step to the next
    first   with one process, from time to time, a virtual rank that is computed before the verified one
    attributes  the models' attributes, when the step begins and whenever the virtual rank is computed
    before  the record of the spare rounds; None: this process had none
    inside  the record of the step's own rounds; None: this process did not compute the virtual rank
    """

    step: int
    virtual_rank: int
    turn: int
    first: int | None = None
    attributes: list[Mapping[str, str]] = field(default_factory=list)
    before: PassRecord | None = None
    inside: PassRecord | None = None
    sums: GradientSums | None = None
