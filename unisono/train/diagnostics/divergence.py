"""Divergence check: compare the weights of all processes.

    every n steps           rank 0          rank 1          rank 2
    gradients, as whole     8f3a            8f3a            8f3a
    weights, after update   51c0            51c0            e77d    <- its memory, its processor, or a line of the loop
                               '---- one hash each, compared ----'

Replicas are equal by construction: they begin with the same weights, and step with the same gradient. An error that
breaks this equality is silent: a bit that flips in memory, a core that computes wrongly, or `if run.is_main:` around a
line that writes to the model. Each process then computes its gradients with different weights. Therefore each process
hashes its whole state every n steps (tensors/digest.py), and the hashes are compared. They are also compared before
every checkpoint, so that no checkpoint has weights that only the main process has.

If hashes differ, every tensor is compared. The error names the first tensor that differs, and the rank whose tensor
differs from most others. Then the run stops. With divergence.repair, that rank receives the tensors of the others
instead, and the promise states the first step after which the weights may have differed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from unisono.config.wording import plural
from unisono.distributed.process_group import ProcessGroup, to_local, wrap_peer_errors
from unisono.distributed.roles import RoleGroup
from unisono.errors import DivergenceError
from unisono.plan.rng_keys import mix
from unisono.tensors.digest import tensor_hashes
from unisono.train.context import LoopParts, RunContext
from unisono.train.diagnostics.bit_difference import bit_difference
from unisono.train.diagnostics.majority_vote import VoteResult, vote
from unisono.train.extensions import Extension
from unisono.train.gradient_pass import GradientPass
from unisono.train.step_state import StepState

WHAT = "Comparing what processes hold"


class Difference(NamedTuple):
    """The first tensor that is not the same on all processes, and the ranks with each value.

    of  ("gradient" or "weights", its name)
    """

    of: tuple[str, str]
    verdict: VoteResult
    ranks: Sequence[int]
    tensors: int  # number of tensors of its kind that differ
    all: int

    def __str__(self) -> str:
        kind, name = self.of
        what, wrong = f"gradient of {name}" if kind == "gradient" else name, self.verdict.wrong
        if self.verdict.right is None:
            text = f"{named(self.ranks)} hold different values of {what}, and no majority says which is right"
        else:
            others = len(self.ranks) - len(wrong)
            text = f"{named(wrong)} {'holds' if len(wrong) == 1 else 'hold'} another {what} than the {others} others"
        return f"{text} ({self.tensors} of {plural(self.all, 'tensor')})"


class DivergenceCheck(Extension):
    """Compare the state of processes. Either every process of the run has this check, or none has.

    compared  number of comparisons
    """

    def __init__(self, context: RunContext, parts: LoopParts) -> None:
        settings = context.settings.divergence
        self.context, self.parts = context, parts
        self.every, self.repair = settings.every, settings.repair
        context.progress.same_after = context.progress.steps_done  # a run begins with equal weights
        self._compared_after: int | None = context.progress.steps_done  # None: processes have joined or died
        self.compared = 0
        self._gradients: dict[str, int] = {}  # hashes of the gradients of a step that will be compared

    @property
    def world(self) -> ProcessGroup:
        """The processes that hold the same weights."""
        return self.parts.sync.group

    def _is_due(self, done: int) -> bool:
        return self.every > 0 and done % self.every == 0

    def before_update(self, step: StepState, gradients: Sequence[GradientPass]) -> None:
        if self._is_due(step.number + 1):
            params = [p for gradient in gradients for p in gradient.params]
            names = [self.context.models.names.get(id(p), "a parameter") for p in params]
            self._gradients |= dict(zip(names, tensor_hashes(to_local(p.grad) for p in params), strict=True))

    def after_step(self, step: StepState) -> None:
        if self._is_due(step.number + 1):
            self.context.collective.run(WHAT, lambda: self.compare(step.number + 1))

    def before_save(self, steps_done: int) -> None:
        self.compare(steps_done)

    def regrouped(self, first: int, *, failed: bool) -> None:
        self._gradients, self._compared_after = {}, None  # a process may have missed a comparison

    def compare(self, done: int, *, now: bool = False) -> bool:
        """Compare the state of the processes after `done` steps, unless it was compared already, or the setting is off.

        Args:
            done: number of steps.
            now: compare regardless of the settings.

        Returns:
            True if all processes hold the same state; False if they do after a repair.

        Raises:
            DivergenceError: the states differ. All processes raise the error.
        """
        if (done == self._compared_after or not self.every) and not now:
            return True
        gradients = self._gradients
        self.context.models.reshard()
        world, held = self.world, dict(self._held())
        weights = tensor_hashes(to_local(tensor.detach()) for tensor in held.values())
        with wrap_peer_errors(WHAT):
            rows = world.all_gather_object([self._place(), mix(*weights), mix(*gradients.values())])
            self.compared += 1
            if all(row == other for row in rows for other in rows if row[0] == other[0]):
                self._same_after(done)
                return True
            mine = {("gradient", name): found for name, found in gradients.items()}
            mine |= {("weights", name): found for name, found in zip(held, weights, strict=True)}
            by_rank = world.all_gather_object([self._place(), [[*key, found] for key, found in mine.items()]])
            self._object(done, _first(by_rank), by_rank, held)
        return False

    def _same_after(self, done: int) -> None:
        """Record that all processes hold the same state."""
        self.context.progress.same_after = self._compared_after = done
        self._gradients = {}

    def _object(
        self, done: int, first: Difference | None, by_rank: Sequence[Any], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Repair a difference between processes, or raise DivergenceError."""
        if first is None:
            raise self._diverged(done, "They do not hold tensors of the same names.", "")
        alike = len({row[0] for row in by_rank}) == 1
        verdict, detail = first.verdict, ""
        right = next((r for r in first.ranks if verdict.right is not None and r not in verdict.wrong), first.ranks[0])
        if alike and first.of[0] == "weights":
            detail = self._detail(tensors[first.of[1]], right)
        if self.repair and alike and verdict.right is not None:
            self._repair(done, first, right, detail)
            return
        why = ""
        if self.repair:
            why = "So no rank can be repaired." if alike else "divergence.repair needs replicas of whole models."
        true = f"{first}{detail}."
        raise self._diverged(done, true[0].upper() + true[1:], why)

    def _detail(self, tensor: torch.Tensor, right: int) -> str:
        """Describe the difference from the tensor of rank `right`, as the first process with another tensor sees it."""
        world = self.world
        theirs = tensor.detach().clone()
        world.broadcast_([theirs], source=right)
        found = bit_difference(tensor, theirs)
        texts = world.all_gather_object(None if found is None else str(found))
        return next((f": {text}" for text in texts if text), "")

    def _repair(self, done: int, first: Difference, right: int, detail: str) -> None:
        """Send the state of rank `right` to all processes: models and optimizers."""
        progress = self.context.progress
        self.world.broadcast_(self._state(), source=right)
        self.context.monitor.note(f"After {plural(done, 'step')}: {first}{detail}. Repaired: it has theirs now.")
        field, to = (
            f"the weights of {named(first.verdict.wrong)}",
            f"others, until healed after {plural(done, 'step')}",
        )
        progress.changes.append({"step": progress.same_after, "field": field, "from": "those of all", "to": to})
        self._same_after(done)

    def _diverged(self, done: int, true: str, why: str) -> DivergenceError:
        before = plural(self.context.progress.same_after, "step")
        return DivergenceError(
            f"The {self.world.size} processes hold different values after {plural(done, 'step')}.",
            f"{true} After {before} all was the same. {why}".rstrip(),
            "continue from the newest checkpoint, which was compared before it was written (--resume). To find out "
            f"whether the loop or a machine is the cause: unisono check SCRIPT, and unisono audit "
            f"{self.parts.checks.run_dir}",
        )

    def _place(self) -> str:
        """Return a key of the part of the model on this process. Processes with equal keys hold equal tensors."""
        mesh = self.parts.sync.mesh
        return f"{mesh.shard.rank} {mesh.tensor.rank} {mesh.pipeline.rank}"

    def _held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the models that a checkpoint would hold, by name, each tensor once."""
        seen: set[int] = set()
        models = self.context.state.models
        for model, module in models.items():
            for name, value in module.state_dict(keep_vars=True).items():
                if isinstance(value, torch.Tensor) and id(value) not in seen:
                    seen.add(id(value))
                    yield f"{model}.{name}" if len(models) > 1 else name, value

    def _state(self) -> list[torch.Tensor]:
        """Return the same tensors and those of optimizers, in an order that is the same on every process."""
        found = [tensor for _, tensor in self._held()]
        for optimizer in self.parts.checks.steppers:
            for of in getattr(optimizer, "state", {}).values():
                found += [value for _, value in sorted(of.items()) if isinstance(value, torch.Tensor)]
        return found


def named(ranks: Sequence[int]) -> str:
    """Return ranks as text: "rank 2", "ranks 0, 1 and 3"."""
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def _first(by_rank: Sequence[tuple[str, Sequence[tuple[str, str, int]]]]) -> Difference | None:
    """Return the first tensor that differs between processes with the same part. Gradients come before weights."""
    found: list[tuple[tuple[str, str], VoteResult, list[int]]] = []
    held = [{(kind, name): number for kind, name, number in rows} for _, rows in by_rank]
    for place in dict.fromkeys(place for place, _ in by_rank):
        ranks = [rank for rank, (where, _) in enumerate(by_rank) if where == place]
        for key in held[ranks[0]]:
            verdict = vote([(rank, held[rank].get(key)) for rank in ranks])
            if not verdict.agree:
                found.append((key, verdict, ranks))
    if not found:
        return None
    found.sort(key=lambda each: each[0][0] != "gradient")  # stable: in the order of the model
    key, verdict, ranks = found[0]
    of_kind = {other for other, _, _ in found if other[0] == key[0]}
    return Difference(key, verdict, ranks, len(of_kind), sum(kind == key[0] for kind, _ in held[ranks[0]]))


def build_divergence(context: RunContext, parts: LoopParts) -> list[DivergenceCheck]:
    """Build the divergence check of a run.

    There is none if no two processes have to hold the same state: under parameter servers, and on different machines,
    whose replicas drift apart in their last bits.
    """
    mesh = context.mesh
    alone = mesh.replicate.size == mesh.context.size == 1 and mesh.world.monitor is None  # no process will join
    if alone or isinstance(mesh.world, RoleGroup):
        return []
    if context.progress.differences or mesh.world.mixed:  # a process that joins later has no list of differences yet
        if context.settings.divergence.every:
            context.monitor.note(
                "weights are not compared (divergence.every): these machines do not compute the same bits"
            )
        return []
    return [DivergenceCheck(context, parts)]
