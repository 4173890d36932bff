"""The divergence watch: do all processes still hold the same weights?

    every n steps           rank 0          rank 1          rank 2
    gradients, as whole     8f3a            8f3a            8f3a
    weights, after update   51c0            51c0            e77d    <- its memory, its processor, or a line of the loop
                               '---- one number each, compared ----'

Replicas are the same by construction: they begin with the same weights, and step with the same gradient. What breaks
that is silent: a bit that flips in memory, a core that computes wrongly, `if run.is_main:` around something that writes
to the model. The result is then no longer anybody's, since every process computes its gradients with weights of its
own. So now and then each process makes one number of all that it holds (tensors/digest.py), and they are
compared. They are as well before every checkpoint, so that none is written of weights that only the main process has.

On a mismatch every tensor is compared, and the first that differs is told, with the rank that has another one than
most. Then the run stops; or with divergence.repair the others give theirs to it, and the promise says since when.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from unisono.config.wording import plural
from unisono.distributed.process_group import to_local, wrap_peer_errors
from unisono.distributed.roles import RoleGroup
from unisono.errors import DivergenceError
from unisono.plan.rng_keys import mix
from unisono.tensors.digest import tensor_hashes
from unisono.train.diagnostics.bit_difference import bit_difference
from unisono.train.diagnostics.majority_vote import VoteResult, vote

if TYPE_CHECKING:
    from unisono.train.gradient_pass import GradientPass
    from unisono.train.loop import StepLoop
    from unisono.train.run import Run

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
            who = f"{named(self.ranks)} hold different values of {what}, and no majority says which is right"
        else:
            others = len(self.ranks) - len(wrong)
            who = f"{named(wrong)} {'holds' if len(wrong) == 1 else 'hold'} another {what} than the {others} others"
        return f"{who} ({self.tensors} of {plural(self.all, 'tensor')})"


class DivergenceCheck:
    """The watch of one process. Every process of the run has one, or none has."""

    def __init__(self, engine: StepLoop, run: Run[Any]) -> None:
        settings = run.settings.divergence
        self.engine, self.state, self.changes, self.note = engine, run._state, run.changes, run._watcher.note
        self.every, self.heal = settings.every, settings.repair
        self.together = run.together
        self.same_after = run.steps_done
        """After so many steps all held the same; a run begins so."""
        self._compared_after: int | None = run.steps_done  # None: others have come or gone since, who may not have
        self.compared = 0  # how often
        self._given: dict[str, int] = {}  # the gradients' digests, of the step that is compared

    def _due(self, done: int) -> bool:
        return self.every > 0 and done % self.every == 0

    def given(self, step: int, gradients: Sequence[GradientPass]) -> None:
        """These are whole, and about to be used."""
        if self._due(step + 1):
            params = [p for gradient in gradients for p in gradient.params]
            names = [self.engine.models.names.get(id(p), "a parameter") for p in params]
            self._given |= dict(zip(names, tensor_hashes(to_local(p.grad) for p in params), strict=True))

    def after(self, step: int) -> None:
        """A step is over."""
        if self._due(step + 1):
            self.together(WHAT, lambda: self.compare(step + 1))

    def doubt(self) -> None:
        """Processes have died, or joined: some may have compared what others have not."""
        self._given, self._compared_after = {}, None

    def compare(self, done: int, *, now: bool = False) -> bool:
        """After `done` steps: compare, if that has not been done; or `now`, whatever the settings say. True: all held
        the same; False: they do since they were healed. Raises Diverged on every process."""
        if (done == self._compared_after or not self.every) and not now:
            return True
        gradients = self._given
        self.engine.models.reshard()
        world, held = self.engine.mesh.world, dict(self._held())
        weights = tensor_hashes(to_local(tensor.detach()) for tensor in held.values())
        with wrap_peer_errors(WHAT):
            said = world.all_gather_object([self._place(), mix(*weights), mix(*gradients.values())])
            self.compared += 1
            if all(row == other for row in said for other in said if row[0] == other[0]):
                self._met_after(done)
                return True
            mine = {("gradient", name): found for name, found in gradients.items()}
            mine |= {("weights", name): found for name, found in zip(held, weights, strict=True)}
            everybody = world.all_gather_object([self._place(), [[*key, found] for key, found in mine.items()]])
            self._object(done, _first(everybody), everybody, held)
        return False

    def _met_after(self, done: int) -> None:
        """All hold the same."""
        self.same_after = self._compared_after = done
        self._given = {}

    def _object(
        self, done: int, first: Difference | None, everybody: Sequence[Any], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """They differ: heal, or raise Diverged."""
        if first is None:
            raise self._diverged(done, "They do not hold tensors of the same names.", "")
        alike = len({row[0] for row in everybody}) == 1
        verdict, detail = first.verdict, ""
        right = next((r for r in first.ranks if verdict.right is not None and r not in verdict.wrong), first.ranks[0])
        if alike and first.of[0] == "weights":
            detail = self._detail(tensors[first.of[1]], right)
        if self.heal and alike and verdict.right is not None:
            self._heal(done, first, right, detail)
            return
        why = ""
        if self.heal:
            why = "divergence.repair needs whole models side by side." if alike is False else "So nobody can be healed."
        true = f"{first}{detail}."
        raise self._diverged(done, true[0].upper() + true[1:], why)

    def _detail(self, tensor: torch.Tensor, right: int) -> str:
        """How the tensor differs from that of rank `right`, in words, as the first one that has another knows it."""
        world = self.engine.mesh.world
        theirs = tensor.detach().clone()
        world.broadcast_([theirs], source=right)
        found = bit_difference(tensor, theirs)
        told = world.all_gather_object(None if found is None else str(found))
        return next((f": {text}" for text in told if text), "")

    def _heal(self, done: int, first: Difference, right: int, detail: str) -> None:
        """What rank `right` holds, models and what optimizers keep, on every process."""
        world = self.engine.mesh.world
        world.broadcast_(self._state(), source=right)
        self.note(f"After {plural(done, 'step')}: {first}{detail}. Healed: it has theirs now.")
        field, to = (
            f"the weights of {named(first.verdict.wrong)}",
            f"others, until healed after {plural(done, 'step')}",
        )
        self.changes.append({"step": self.same_after, "field": field, "from": "those of all", "to": to})
        self._met_after(done)

    def _diverged(self, done: int, true: str, why: str) -> DivergenceError:
        before = plural(self.same_after, "step")
        return DivergenceError(
            f"After {plural(done, 'step')} the {self.engine.mesh.world.size} processes compared what they hold.",
            f"{true} After {before} all was the same. {why}".rstrip(),
            "go on from the newest checkpoint, which was compared before it was written (--resume). Is it the loop "
            f"or a machine? unisono check SCRIPT, and unisono audit {self.engine.run_dir}",
        )

    def _place(self) -> str:
        """Processes of the same place hold the same."""
        mesh = self.engine.mesh
        return f"{mesh.shard.rank} {mesh.tensor.rank} {mesh.pipeline.rank}"

    def _held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All that a checkpoint would hold of the models, by name, each tensor once."""
        seen: set[int] = set()
        models = self.state.models
        for model, module in models.items():
            for name, value in module.state_dict(keep_vars=True).items():
                if isinstance(value, torch.Tensor) and id(value) not in seen:
                    seen.add(id(value))
                    yield f"{model}.{name}" if len(models) > 1 else name, value

    def _state(self) -> list[torch.Tensor]:
        """The same, and what optimizers keep, in an order that every process has."""
        found = [tensor for _, tensor in self._held()]
        for optimizer in self.engine.steppers:
            for of in getattr(optimizer, "state", {}).values():
                found += [value for _, value in sorted(of.items()) if isinstance(value, torch.Tensor)]
        return found


def named(ranks: Sequence[int]) -> str:
    """Rank 2; ranks 0, 1 and 3."""
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def _first(everybody: Sequence[tuple[str, Sequence[tuple[str, str, int]]]]) -> Difference | None:
    """The first tensor that differs between processes of one place: gradients come before what was made of them."""
    found: list[tuple[tuple[str, str], VoteResult, list[int]]] = []
    held = [{(kind, name): number for kind, name, number in rows} for _, rows in everybody]
    for place in dict.fromkeys(place for place, _ in everybody):
        ranks = [rank for rank, (where, _) in enumerate(everybody) if where == place]
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


def build_divergence(engine: StepLoop, run: Run[Any]) -> DivergenceCheck | None:
    """The watch of a run; None, where no two processes must hold the same: under parameter servers, and on machines
    that are unlike, whose replicas drift apart in their last bits."""
    mesh = engine.mesh
    alone = mesh.replicate.size == mesh.context.size == 1 and mesh.world.company is None  # and nobody will join
    if alone or isinstance(mesh.world, RoleGroup):
        return None
    if run.differences or mesh.world.mixed:  # who joins later has not heard of differences yet
        if run.settings.divergence.every:
            run.print("weights are not compared (divergence.every): these machines do not compute the same bits")
        return None
    return DivergenceCheck(engine, run)
