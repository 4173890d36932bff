"""A step that is verified: what this process has noted of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.train.verification.gradient_sums import GradientSums
from unisono.train.verification.pass_record import PassRecord


@dataclass
class CheckedStep:
    """A step that is verified, on this process.

    turn    goes up from one verified step to the next
    first   with one process, now and then, a virtual rank that is computed before it
    attributes  of the models, when the step begins and whenever the virtual rank is computed
    before  what spare rounds gave; None: this process had none
    inside  what the step's own rounds gave; None: this process did not compute the virtual rank
    """

    step: int
    virtual_rank: int
    turn: int
    first: int | None = None
    attributes: list[Mapping[str, str]] = field(default_factory=list)
    before: PassRecord | None = None
    inside: PassRecord | None = None
    sums: GradientSums | None = None
