"""How the parameters of a run are laid out: their order, which of them train, and the groups of each optimizer.

A script may change this in the midst of a run (unfreeze a layer once, add a group to an optimizer), and a process that
resumes or joins later does not come to that line again. So it is part of the saved state.

    saved           now, before the first step      after the resume
    head trains     head trains                     head trains
    body trains     body is frozen                  body trains; the optimizer has a second group
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from unisono.distributed.process_group import ProcessGroup
from unisono.errors import CheckpointError

Named = Callable[[], Mapping[str, torch.nn.Parameter]]
"""The parameters of all placed models, by name ("0/encoder.weight"), in their order."""

UNKNOWN = "?"
"""A parameter of no placed model."""

SORTED = "make layers and groups in a fixed order: for name in sorted(names), since a set has another order elsewhere."


class ParameterLayout:
    """The layout of a run, as one thing in a checkpoint.

    enabled     False: neither saved nor restored
    optimizers  what is tracked and has groups of parameters, by name
    whole       does this process hold all parameters (no pipeline, no several servers)? If not, nothing is saved
    """

    enabled = True

    def __init__(self, named: Named, optimizers: Callable[[], Mapping[str, Any]], whole: Callable[[], bool]) -> None:
        self.named, self.optimizers, self.whole = named, optimizers, whole
        self._saved: Mapping[str, Any] = {}
        self._began: set[str] | None = None  # what is frozen in a process that begins the loop

    def state_dict(self) -> dict[str, Any]:
        """Names are joined to one text: there may be thousands, and buddies pack this after every step."""
        if not (self.enabled and self.whole()):
            return {}
        named = self.named()
        frozen = [name for name, p in named.items() if not p.requires_grad]
        began = sorted(self._began) if self._began is not None else frozen
        groups = {name: self._groups(thing) for name, thing in self.optimizers().items()}
        texts = {"names": "\n".join(named), "frozen": "\n".join(frozen), "began": "\n".join(began)}
        return {**texts, "groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep it until `apply`; `fit` reads it too."""
        self._saved = state if self.enabled else {}

    def apply(self) -> list[tuple[str, Any, Any]]:
        """Before the first step: what was saved becomes so, except where the script begins otherwise than it did when
        the state was saved. Returns what is not as it was saved: name, from, to. Raises CheckpointError if the
        parameters have another order."""
        named = self.named()
        if self._began is None:
            self._began = {name for name, p in named.items() if not p.requires_grad}
        if not self._saved:
            return []
        names, frozen, began = (_split(self._saved[key]) for key in ("names", "frozen", "began"))
        self._check_order(names, [*named])
        known, was, now = set(names), set(frozen), set(began)
        changes = []
        for name, p in named.items():
            if name not in known:
                continue
            if (name in now) == (name in self._began):
                p.requires_grad_(name not in was)
            elif p.requires_grad == (name in was):
                changes.append((f"requires_grad of {name.partition('/')[2]}", name not in was, p.requires_grad))
        return changes

    def _check_order(self, saved: list[str], now: list[str]) -> None:
        if not self.whole() or saved == now or set(saved) != set(now):  # a model that grew is loaded by its names
            return
        first, other = next((a, b) for a, b in zip(saved, now, strict=True) if a != b)
        raise CheckpointError(
            "A run was to be resumed whose model has its parameters in another order.",
            f"{_word(first)} stands where now {_word(other)} does.",
            SORTED,
        )

    def fit(self, name: str, optimizer: Any) -> None:
        """Before a state is loaded into an optimizer: it is given the groups that were added in the midst of the run.
        Raises CheckpointError if its parameters are not those that the state belongs to."""
        saved = [_split(text) for text in self._saved.get("groups", {}).get(name, ())]
        if not saved or not self.whole():
            return
        now, named = [_split(text) for text in self._groups(optimizer)], self.named()
        common = min(len(saved), len(now))
        more = saved[len(now) :]
        if now[:common] != saved[:common] or len(now) > len(saved) or any(p not in named for of in more for p in of):
            raise _misfit(name, optimizer, saved, now)
        for of in more:
            optimizer.add_param_group({"params": [named[p] for p in of]})

    def check_alike(self, group: ProcessGroup) -> None:
        """Is it the same on all processes? Each saves what it has of an optimizer by number. Raises CheckpointError on
        all of them if not."""
        if group.size == 1 or not self.enabled:
            return
        mine = self.state_dict()
        if len(set(group.all_gather_object(zlib.crc32(json.dumps(mine, sort_keys=True).encode())))) == 1:
            return
        first, *others = group.all_gather_object(mine)
        rank, other = next((r, of) for r, of in enumerate(others, 1) if of != first)
        what = next(key for key in ("names", "frozen", "groups", "began") if first.get(key) != other.get(key))
        words = {"names": "other parameters", "groups": "optimizers with other groups of parameters"}
        raise CheckpointError(
            "A checkpoint was to be written.",
            f"Rank {rank} has {words.get(what, 'other parameters that train')} than rank 0.",
            f"freeze and build the same on every process; {SORTED}",
        )

    def _groups(self, optimizer: Any) -> list[str]:
        """The names of each group's parameters."""
        names = {id(p): name for name, p in self.named().items()}
        return ["\n".join(names.get(id(p), UNKNOWN) for p in group["params"]) for group in optimizer.param_groups]


def _split(text: str) -> list[str]:
    return text.split("\n") if text else []


def _word(name: str) -> str:
    return name.partition("/")[2] or name


def _misfit(name: str, optimizer: Any, saved: list[list[str]], now: list[list[str]]) -> CheckpointError:
    asked = f"{name!r} ({type(optimizer).__name__}) was to be resumed."
    if sorted(p for of in saved for p in of) == sorted(p for of in now for p in of) and len(saved) == len(now):
        pairs = zip((p for of in saved for p in of), (p for of in now for p in of), strict=True)
        first, other = next((a, b) for a, b in pairs if a != b)
        true = f"Its state does not fit: it has the same parameters in another order: {_word(first)} stands where now "
        true += f"{_word(other)} does."
        return CheckpointError(asked, true, SORTED)
    number = next((i for i, (a, b) in enumerate(zip(saved, now, strict=False)) if a != b), min(len(saved), len(now)))
    counts = [len(groups[number]) if number < len(groups) else 0 for groups in (saved, now)]
    true = f"Its state does not fit: its group {number} had {counts[0]} parameters when it was saved, and has "
    true += f"{counts[1]} now"
    lost = [p for p in (saved[number] if number < len(saved) else []) if not (number < len(now) and p in now[number])]
    true += f" ({_word(lost[0])} is not among them)." if lost else "."
    return CheckpointError(
        asked,
        true,
        "resume with the script that began the run: groups that it has added since come back by themselves.",
    )
