"""Divergence check: do all processes still hold the same weights?

    every n steps           rank 0          rank 1          rank 2
    gradients, as whole     8f3a            8f3a            8f3a
    weights, after update   51c0            51c0            e77d    <- its memory, its processor, or a line of the loop
                               '---- one hash each, compared ----'

Replicas are equal by construction: they begin with the same weights, and step with the same gradient. What breaks that
is silent: a bit that flips in memory, a core that computes wrongly, `if run.is_main:` around a line that writes to the
model. Then every process computes its gradients with weights of its own. So now and then each process hashes all that
it holds (tensors/digest.py), and the hashes are compared; also before every checkpoint, so that none is
written of weights that only the main process has.

If hashes differ, every tensor is compared. The error names the first one that differs, and the rank whose tensor
differs from most. Then the run stops; with divergence.repair that rank receives the tensors of the others, and the
promise says since when.
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
    """The first tensor that is not the same everywhere, and the ranks of the run that hold it.

    of  ("gradient" or "weights", its name)
    """

    of: tuple[str, str]
    verdict: VoteResult
    ranks: Sequence[int]
    tensors: int  # how many differ, of its kind
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
    """Compare what processes hold. Every process of the run has one, or none has.

    compared  number of comparisons
    """

    def __init__(self, context: RunContext, parts: LoopParts) -> None:
        settings = context.settings.divergence
        self.context, self.parts = context, parts
        self.every, self.repair = settings.every, settings.repair
        context.progress.same_after = context.progress.steps_done  # a run begins with equal weights
        self._compared_after: int | None = context.progress.steps_done  # None: others have come, or some have died
        self.compared = 0
        self._gradients: dict[str, int] = {}  # hashes of the gradients of a step that is compared

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
        self._gradients, self._compared_after = {}, None  # some may have compared what others have not

    def compare(self, done: int, *, now: bool = False) -> bool:
        """Compare what the processes hold after `done` steps, unless that is done, or the setting is off.

        Args:
            done: number of steps.
            now: compare whatever the settings say.

        Returns:
            True if all hold the same; False if they do since they were repaired.

        Raises:
            DivergenceError: they differ; on every process.
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
        """Record that all processes hold the same."""
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
        """Describe how the tensor differs from that of rank `right`, as the first process with another one sees it."""
        world = self.world
        theirs = tensor.detach().clone()
        world.broadcast_([theirs], source=right)
        found = bit_difference(tensor, theirs)
        texts = world.all_gather_object(None if found is None else str(found))
        return next((f": {text}" for text in texts if text), "")

    def _repair(self, done: int, first: Difference, right: int, detail: str) -> None:
        """Give all processes what rank `right` holds: models, and what optimizers keep."""
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
        """Return a key of the part of the model that this process holds: equal keys, equal tensors."""
        mesh = self.parts.sync.mesh
        return f"{mesh.shard.rank} {mesh.tensor.rank} {mesh.pipeline.rank}"

    def _held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all that a checkpoint would hold of the models, by name, each tensor once."""
        seen: set[int] = set()
        models = self.context.state.models
        for model, module in models.items():
            for name, value in module.state_dict(keep_vars=True).items():
                if isinstance(value, torch.Tensor) and id(value) not in seen:
                    seen.add(id(value))
                    yield f"{model}.{name}" if len(models) > 1 else name, value

    def _state(self) -> list[torch.Tensor]:
        """Return the same tensors, and what optimizers keep, in an order that every process has."""
        found = [tensor for _, tensor in self._held()]
        for optimizer in self.parts.checks.steppers:
            for of in getattr(optimizer, "state", {}).values():
                found += [value for _, value in sorted(of.items()) if isinstance(value, torch.Tensor)]
        return found


def named(ranks: Sequence[int]) -> str:
    """Return ranks in words: "rank 2", "ranks 0, 1 and 3"."""
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def _first(by_rank: Sequence[tuple[str, Sequence[tuple[str, str, int]]]]) -> Difference | None:
    """Return the first tensor that differs between processes of one place: gradients come before weights."""
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

    There is none where no two processes have to hold the same: under parameter servers, and on machines that differ,
    whose replicas drift apart in their last bits.
    """
    mesh = context.mesh
    alone = mesh.replicate.size == mesh.context.size == 1 and mesh.world.monitor is None  # and none will join
    if alone or isinstance(mesh.world, RoleGroup):
        return []
    if context.progress.differences or mesh.world.mixed:  # a process that joins later does not know differences yet
        if context.settings.divergence.every:
            context.monitor.note(
                "weights are not compared (divergence.every): these machines do not compute the same bits"
            )
        return []
    return [DivergenceCheck(context, parts)]
