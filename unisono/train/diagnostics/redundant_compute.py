"""The audit: one virtual rank of a step is computed in several places, and compared bit for bit.

    every n steps    rank 0     rank 1     rank 2     rank 3
    before the step  v5: 8f3a   v5: 8f3a   v5: 07c1   (waits)       rank 2 computes wrongly
    the step         v0 v1      v2 v3      v4 v5      v6 v7
                                               '-- must be equal to the result before

Among many processors, silent wrong results are not rare (Hochschild et al., Cores that don't count, HotOS 2021; Dixit
et al., Silent data corruptions at scale, arXiv 2102.11245). Random numbers are keyed, and any process may compute a
virtual rank. Therefore the same work can be assigned to another process at any time, and must give the same result, to
the bit.

With three processes or more, the process that computes the virtual rank in this step and two others compute it, and two
of them outvote the third. With two processes, both compute it. If the results differ, both compute it once more: a
process that contradicts itself is wrong. If each process repeats its own result, two processes cannot decide which one
is right. One process computes it twice, and a third time if the results differ.

The audit runs before the step's rounds, in rounds of its own. They have no effect on the loss, the weight, the buffers
and the messages of the exchange. An audited step takes longer by the time of one virtual rank. The audited virtual rank
changes from audit to audit, and so do the processes that compute it in addition to its own process.
"""

from __future__ import annotations

import socket
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from unisono.config.wording import plural
from unisono.distributed.process_group import ProcessGroup, to_local, wrap_peer_errors
from unisono.errors import DivergenceError
from unisono.plan.rng_keys import mix
from unisono.tensors.digest import tensor_hash, tensor_hashes
from unisono.train.batches.spare_rounds import SpareRounds
from unisono.train.context import LoopParts, RunContext
from unisono.train.diagnostics.bit_difference import bit_difference
from unisono.train.diagnostics.divergence import DivergenceCheck, named
from unisono.train.diagnostics.majority_vote import VoteResult, vote
from unisono.train.extensions import Extension
from unisono.train.gradient_pass import GradientPass
from unisono.train.step_state import StepState

WHAT = "An audit"

TURNS = {1: (2, 3), 2: (1, 2)}
"""By number of processes: how often each one computes it, at least and if the results differ. Others: once."""


class ComputedNumbers(NamedTuple):
    """The results of this process for the virtual rank, by parameter.

    `given` has a hash of the gradients that its backward passes gave, and `grads` the whole of their sum.
    """

    given: Sequence[int]
    grads: Sequence[torch.Tensor | None]

    @property
    def numbers(self) -> list[int]:
        hashes = tensor_hashes(map(to_local, self.grads))
        return [mix(given, whole) for given, whole in zip(self.given, hashes, strict=True)]


class AuditPlan(NamedTuple):
    """The audited virtual rank and the processes that compute it. The first of them has it in this step anyway."""

    virtual_rank: int
    ranks: Sequence[int]


class RedundantCompute(Extension):
    """Compute a virtual rank in several places. Either every process of the run has this audit, or none has.

    done   the audits so far: step, virtual rank, ranks
    found  the differences, for programs; {}: there are none
    """

    def __init__(self, context: RunContext, parts: LoopParts, divergence: DivergenceCheck | None) -> None:
        """`divergence` compares the weights of processes that have to hold the same ones."""
        self.parts, self.models, self.every = parts, context.models, context.settings.audit_every
        self.divergence = divergence
        self.spare = SpareRounds(parts.source, context.models, parts.checks)
        self.done: list[tuple[int, int, Sequence[int]]] = []
        self.found: Mapping[str, Any] = {}
        self._now: AuditPlan | None = None  # the audit of this step
        self._right = 0  # the hash that the step's own backward passes must give
        self._noted: list[list[torch.Tensor]] = []  # by parameter
        self._hooks: list[Any] = []

    @property
    def world(self) -> ProcessGroup:
        """The processes that run steps together."""
        return self.parts.sync.group

    def plan(self, step: int) -> AuditPlan | None:
        """Return the audit of `step`, or None if it has none."""
        if (step + 1) % self.every:
            return None
        source, turn = self.parts.source, (step + 1) // self.every - 1
        size, order = self.world.size, source.order
        busy = [v for v in range(order.virtual_ranks) if order.micro_bounds(step, v)]
        virtual_rank = busy[turn % len(busy)]
        owner = next(r for r, (lo, hi) in enumerate(source.schedule.at(step)) if lo <= virtual_rank < hi)
        first = turn // len(busy)
        others = [(owner + 1 + (first + i) % (size - 1)) % size for i in range(min(size - 1, 2))]
        return AuditPlan(virtual_rank, (owner, *others))

    # -- before the step's rounds

    def extra_rounds(self, step: StepState, gradient: GradientPass) -> Iterator[Any]:
        """Yield the micro-batches of the audited virtual rank, if this process computes it. The first step has none.

        Raises:
            DivergenceError: the results differ. All processes raise the error.
        """
        plan = self.plan(step.number) if gradient.seen else None
        if plan is None:
            return
        world = self.world
        least, most = TURNS.get(world.size, (1, 1))
        turns: list[ComputedNumbers | None] = []  # the results of this process
        said: list[Sequence[Sequence[int] | None]] = []  # of all processes: a hash in total, hashes of backward passes
        for turn in range(1, most + 1):
            turns.append((yield from self._compute(step, gradient, plan)) if world.rank in plan.ranks else None)
            made = turns[-1]
            with wrap_peer_errors(WHAT):
                said.append(world.all_gather_object(made and [mix(*made.numbers), mix(*made.given)]))
            verdict = vote([(rank, row[0]) for all_of in said for rank, row in enumerate(all_of) if row])
            if verdict.agree and turn >= least:
                break
        self.done.append((step.number, plan.virtual_rank, plan.ranks))
        if not verdict.agree:
            self._object(step, plan, verdict, gradient, turns, said)
        self._now = plan
        self._right = next(row[1] for row in said[0] if row)
        self._listen(step, gradient)

    def _compute(
        self, step: StepState, gradient: GradientPass, plan: AuditPlan
    ) -> Generator[Any, None, ComputedNumbers]:
        """Yield the virtual rank's micro-batches as spare rounds, and return their gradients."""
        self._now = plan
        self._listen(step, gradient)
        grads = yield from self.spare.gradients(step, gradient, plan.virtual_rank)
        return ComputedNumbers(self._heard(), grads)

    def _listen(self, step: StepState, gradient: GradientPass) -> None:
        """Record from now on the gradients of the audited virtual rank's backward passes."""
        params = gradient.leaves
        self._noted = [[] for _ in params]

        def note(number: int, grad: torch.Tensor) -> None:
            if step.place is not None and self._now is not None and step.place.virtual_rank == self._now.virtual_rank:
                self._noted[number].append(tensor_hash(grad))

        self._hooks = [p.register_hook(partial(note, number)) for number, p in enumerate(params)]

    def _heard(self) -> list[int]:
        """Stop recording, and return a hash of the recorded gradients for each parameter."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        return [mix(*(int(each) for each in found)) for found in self._noted]

    # -- after the rounds

    def gradient_ready(self, step: StepState, gradient: GradientPass) -> None:
        """Compare the gradients of the step's own rounds with those of the audit before them.

        Raises:
            DivergenceError: they differ. All processes raise the error.
        """
        plan, self._now = self._now, None
        if plan is None:
            return
        computed = any(self._noted)
        found = mix(*self._heard())
        with wrap_peer_errors(WHAT):
            by_rank = self.world.all_gather_object(found if computed else None)
        wrong = tuple(r for r, other in enumerate(by_rank) if other is not None and other != self._right)
        if wrong:
            true = f"In the step itself {named(wrong)} made other gradients of it than before the step, as all agreed."
            raise self._diverged(step, plan, wrong, true)

    def result(self) -> Mapping[str, Any]:
        return {"audits": len(self.done)}

    # -- errors

    def _object(
        self,
        step: StepState,
        plan: AuditPlan,
        verdict: VoteResult,
        gradient: GradientPass,
        turns: Sequence[ComputedNumbers | None],
        said: Sequence[Sequence[Sequence[int] | None]],
    ) -> None:
        """Raise DivergenceError for results that differ, unless the weights differ and are repaired."""
        if self.divergence is not None and not self.divergence.compare(step.number, now=True):
            return  # different weights give different gradients; the weights are repaired
        works = [AuditWork(turn, rank, row[0]) for turn, of in enumerate(said) for rank, row in enumerate(of) if row]
        # two results that differ; if the wrong one is known, it comes first
        wrong = next((w for w in works if w.rank in verdict.wrong and w.number != verdict.right), works[0])
        right = next(w for w in works if w.number != wrong.number and verdict.right in (None, w.number))
        where = self._where(gradient, turns, wrong, right)
        wrong_ranks, all_of_them = named(verdict.wrong or plan.ranks), named(plan.ranks)
        if verdict.right is not None:
            others = named([rank for rank in plan.ranks if rank not in verdict.wrong])
            true = f"{wrong_ranks} made another gradient than {others}, first of {where}."
        elif verdict.wrong:
            true = f"{wrong_ranks} made another gradient each time, first of {where}."
        elif len(plan.ranks) == 2:
            true = f"{all_of_them} each repeat their own result, so it is unknown which is right. First of {where}."
        else:
            true = f"{all_of_them} made three different gradients, first of {where}."
        raise self._diverged(step, plan, verdict.wrong, true[0].upper() + true[1:])

    def _where(
        self, gradient: GradientPass, turns: Sequence[ComputedNumbers | None], wrong: AuditWork, right: AuditWork
    ) -> str:
        """Describe the first parameter whose gradients differ in these two; the same on every process."""
        world, params = self.world, gradient.leaves

        def of(work: AuditWork) -> ComputedNumbers | None:
            return turns[work.turn] if work.rank == world.rank else None

        mine, theirs = of(wrong), of(right)
        one = world.all_gather_object(mine and mine.numbers)[wrong.rank]
        other = world.all_gather_object(theirs and theirs.numbers)[right.rank]
        differ = [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
        p = params[differ[0]]
        name = self.models.names.get(id(gradient.params[differ[0]]), "a parameter")
        shared = dense(p, theirs and theirs.grads[differ[0]]).clone()
        world.broadcast_([shared], source=right.rank)
        found = None if mine is None else bit_difference(dense(p, mine.grads[differ[0]]), shared)
        how = world.all_gather_object(None if found is None else str(found))[wrong.rank]
        return f"{name}{f': {how}' if how else ''} ({len(differ)} of {plural(len(params), 'tensor')})"

    def _diverged(self, step: StepState, plan: AuditPlan, wrong: Sequence[int], true: str) -> DivergenceError:
        hosts = self.world.all_gather_object(socket.gethostname())
        self.found = {
            "step": step.number,
            "virtual_rank": plan.virtual_rank,
            "ranks": list(plan.ranks),
            "wrong": list(wrong),
            "hosts": [hosts[rank] for rank in wrong],
        }
        if wrong and len(wrong) < len(set(plan.ranks)):
            bad = " and ".join(sorted({hosts[rank] for rank in wrong}))
            do = f"exclude {bad}, and continue with --resume; or look closer:"
            if len(set(hosts)) == 1:
                do = f"continue with --resume on another machine than {bad}; or look closer:"
        else:
            do = "use three processes, so that two equal results identify the wrong one (unisono check tests scripts):"
        return DivergenceError(
            f"Virtual rank {plan.virtual_rank} of step {step.number} has different gradients on {named(plan.ranks)}.",
            true,
            f"{do} unisono audit {self.parts.checks.run_dir} --ranks 3",
        )


class AuditWork(NamedTuple):
    """The result of a process in one turn, as a hash."""

    turn: int
    rank: int
    number: int


def dense(p: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor:
    """Return a gradient of `p`, dense and contiguous; zeros if there is none."""
    full = torch.zeros_like(p) if grad is None else grad
    return (full if full.layout is torch.strided else full.to_dense()).detach().contiguous()


def build_audit(context: RunContext, parts: LoopParts, divergence: DivergenceCheck | None) -> list[RedundantCompute]:
    """Build the audit of a run, if the settings enable it. Different machines would accuse each other."""
    if not context.settings.audit_every:
        return []
    if context.progress.differences:
        context.monitor.note("nothing is audited (audit_every): these machines do not compute the same bits")
        return []
    return [RedundantCompute(context, parts, divergence)]
