"""How the parameters of a run are laid out: their order, which of them train, and the groups of each optimizer.

A script may change this during a run (unfreeze a layer once, add a group to an optimizer), and a process that resumes
or joins later does not execute that line again. So the layout is part of the saved state.

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
"""Returns the parameters of all placed models, by name ("0/encoder.weight"), in their order."""

UNKNOWN = "?"
"""The name of a parameter that belongs to no placed model."""

SORTED = "make layers and groups in a fixed order: for name in sorted(names), since a set has another order elsewhere."


class ParameterLayout:
    """The layout of a run, as one entry of a checkpoint.

    enabled     False: the layout is neither saved nor restored
    optimizers  returns the tracked objects with groups of parameters, by name
    whole       returns whether this process holds all parameters (no pipeline, at most one server); if not, nothing is
                saved
    """

    enabled = True

    def __init__(self, named: Named, optimizers: Callable[[], Mapping[str, Any]], whole: Callable[[], bool]) -> None:
        self.named, self.optimizers, self.whole = named, optimizers, whole
        self._saved: Mapping[str, Any] = {}
        self._began: set[str] | None = None  # parameters that were frozen when this process began the loop

    def state_dict(self) -> dict[str, Any]:
        """Return the layout. Names are joined to one text: there may be thousands, and replicas copy it every step."""
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
        """Restore the saved layout before the first step, unless the script itself has changed how it begins.

        Returns:
            (name, saved value, current value) of everything that differs from the saved layout.

        Raises:
            CheckpointError: the parameters have another order.
        """
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
            "Cannot resume: the model has its parameters in another order.",
            f"The checkpoint has {_word(first)} where the model now has {_word(other)}.",
            SORTED,
        )

    def fit(self, name: str, optimizer: Any) -> None:
        """Add the groups that an optimizer got during the run, before its state is loaded.

        Raises:
            CheckpointError: the state belongs to other parameters.
        """
        saved = [_split(text) for text in self._saved.get("groups", {}).get(name, ())]
        if not saved or not self.whole():
            return
        now, named = [_split(text) for text in self._groups(optimizer)], self.named()
        common = min(len(saved), len(now))
        more = saved[len(now) :]
        if now[:common] != saved[:common] or len(now) > len(saved) or any(p not in named for of in more for p in of):
            raise _mismatch_error(name, optimizer, saved, now)
        for of in more:
            optimizer.add_param_group({"params": [named[p] for p in of]})

    def check_alike(self, group: ProcessGroup) -> None:
        """Check that all processes have the same layout, since each saves its part of an optimizer by number.

        Raises:
            CheckpointError: they differ; on every process.
        """
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
            "Cannot write a checkpoint: processes have different parameters or optimizers.",
            f"Rank {rank} has {words.get(what, 'other parameters that train')} than rank 0.",
            f"freeze and build the same on every process; {SORTED}",
        )

    def _groups(self, optimizer: Any) -> list[str]:
        """Return the names of the parameters of each group, joined to one text."""
        names = {id(p): name for name, p in self.named().items()}
        return ["\n".join(names.get(id(p), UNKNOWN) for p in group["params"]) for group in optimizer.param_groups]


def _split(text: str) -> list[str]:
    return text.split("\n") if text else []


def _word(name: str) -> str:
    return name.partition("/")[2] or name


def _mismatch_error(name: str, optimizer: Any, saved: list[list[str]], now: list[list[str]]) -> CheckpointError:
    """Return the error for a state of other groups of parameters than the optimizer has."""
    error = f"Cannot load the state of {name!r} ({type(optimizer).__name__}): its parameters have changed."
    if sorted(p for of in saved for p in of) == sorted(p for of in now for p in of) and len(saved) == len(now):
        pairs = zip((p for of in saved for p in of), (p for of in now for p in of), strict=True)
        first, other = next((a, b) for a, b in pairs if a != b)
        facts = f"Its state does not fit: it has the same parameters in another order: {_word(first)} where the "
        facts += f"optimizer now has {_word(other)}."
        return CheckpointError(error, facts, SORTED)
    number = next((i for i, (a, b) in enumerate(zip(saved, now, strict=False)) if a != b), min(len(saved), len(now)))
    counts = [len(groups[number]) if number < len(groups) else 0 for groups in (saved, now)]
    facts = f"Its state does not fit: its group {number} had {counts[0]} parameters when it was saved, and has "
    facts += f"{counts[1]} now"
    lost = [p for p in (saved[number] if number < len(saved) else []) if not (number < len(now) and p in now[number])]
    facts += f" ({_word(lost[0])} is not among them)." if lost else "."
    return CheckpointError(
        error,
        facts,
        "resume with the script that began the run: groups that it has added since come back by themselves.",
    )
