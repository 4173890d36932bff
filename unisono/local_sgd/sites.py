"""Sites: groups of processes that train by themselves, and synchronize after some steps (exchange=local_sgd).

    steps      0 ... warmup       ... warmup + every      ... warmup + 2 every      ...
    site 0     |  all  |---- its own steps ----|---- its own steps ----|
               | sites |                 synchronization         synchronization
    site 1     | as one|---- its own steps ----|---- its own steps ----|

Between two synchronizations there is no traffic between sites, not even a flag. The values of a step on which processes
agree (its sums, its loss, whether to stop) are those of the site. At a synchronization every site sends the change of
its weights. The outer step (local_sgd/outer.py) computes the weights from which all sites continue. All sites then
handle the requests of any process (a stop, a checkpoint).

All other state belongs to one site: optimizers, schedules, the scale of fp16, buffers (batch norm's statistics). A
checkpoint has it for every site. Evaluation, a saved model and the model at the end use the mean of the sites' weights
and buffers (of integers, such as a counter: site 0's), which is computed for that moment. Training does not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from unisono import phases
from unisono.config.wording import plural
from unisono.distributed.mesh import build_sites
from unisono.distributed.process_group import to_local, wrap_peer_errors
from unisono.distributed.value_transfer import gather_values
from unisono.errors import LoopError
from unisono.local_sgd.outer import (
    MERGE_ALPHA,
    ModelFragment,
    as_real,
    concatenate,
    fragments_of,
    kinds,
    unflatten,
)
from unisono.local_sgd.site_transport import SiteTransport, chunk_of
from unisono.tensors.digest import tensor_hashes
from unisono.train.context import RunContext
from unisono.train.gradient_sync import GradientSync
from unisono.train.loop import SyncPoint
from unisono.train.state.run_state import EXCHANGE, RANDOM
from unisono.train.step_state import StepState
from unisono.train.step_sync import LOSS, STEP, VERBS

MEETING = "A meeting of the sites"


class LocalSGD:
    """The sites of a run, as an object of one of them.

    number    the number of this site
    mesh      the mesh of its processes
    across    the processes with the same rank in all sites
    is_split  whether sites train by themselves
    met       steps completed at the last synchronization
    """

    def __init__(self, context: RunContext) -> None:
        settings, world = context.settings, context.mesh.world
        self.settings, self.local, self.context = settings, settings.local_sgd, context
        self.models, self.state = context.models, context.state
        self.number, self.mesh, self.across = build_sites(self.local.sites, world)
        self.transport = SiteTransport(self.mesh.world, self.across)
        average = self.local.outer_optimizer == "average"
        how = (1.0, 0.0) if average else (self.local.outer_lr, self.local.outer_momentum)
        self.fragments = [ModelFragment(world.device, *how) for _ in range(self.local.num_fragments)]
        self.is_split = False
        self.met = 0
        self._split_at = 0  # steps completed when the sites were split
        self._last: StepState | None = None
        self._saved: Mapping[str, Any] = {}
        self._own: dict[int, torch.Tensor] = {}  # while all sites are united: this site's tensors
        context.models.heard.append(self._add_parameters)
        context.exchange_states.keep("sites", self)

    def result(self) -> Mapping[str, Any]:
        """Return entries of result.json."""
        steps = 0 if self._last is None else self._last.number + 1 - self._split_at
        return {"sites": self.local.sites, "bytes_per_step": round(self.transport.sent / steps, 1) if steps else 0.0}

    # -- steps

    def begin(self, sync: GradientSync) -> None:
        """Begin the loop."""
        progress, note = self.context.progress, self.context.monitor.note
        done = self.met = progress.steps_done
        every, apart = self.settings.checkpoint.every, self.local.sync_every
        if every and (every % apart or self.local.warmup_steps % apart or self.local.sync_delay):
            note(f"checkpoints are written when sites have met, {plural(apart, 'step')} apart, and not between")
        alone = progress.last - max(done, self.local.warmup_steps)
        if 0 < alone < apart:
            note(f"no meeting in the {plural(alone, 'step')} to come: sites are {plural(apart, 'step')} apart")
        if done >= self.local.warmup_steps:
            self._split(sync)

    def after(self, sync: GradientSync, step: StepState) -> SyncPoint | None:
        """Synchronize the sites after a step, if that is due. Return None if they are not synchronized."""
        progress_agreed = self.context.progress.agreed
        done, before, self._last = step.number + 1, self.met, step
        if not self.is_split:
            self.met = done
            if done == self.local.warmup_steps:
                self._split(sync)
            return SyncPoint(progress_agreed, before)
        agreed: Mapping[str, int] = {}
        with phases.phase("exchange"), wrap_peer_errors(MEETING):
            for number, fragment in enumerate(self.fragments):
                if (done - self.local.warmup_steps) % self.local.sync_every == self._turn(number):
                    self._send(fragment, step, progress_agreed)
            for fragment in self.fragments:
                if (fragment.letters or fragment.arrived) and fragment.due <= done:
                    agreed = self._receive(fragment)
                    self.met = done
        return SyncPoint(agreed, before) if self.met == done else None

    def _turn(self, fragment: int) -> int:
        """Return the step of a round after which this fragment is synchronized. The last fragment ends the round."""
        return (fragment + 1) * self.local.sync_every // self.local.num_fragments % self.local.sync_every

    def _split(self, sync: GradientSync) -> None:
        """Let every site train by itself from the next step on."""
        order, last = sync.order, self.context.progress.last
        share = self.settings.virtual_ranks // self.local.sites
        smallest = order.batch_size(order.steps_per_epoch - 1)
        if smallest < self.local.sites and last >= order.steps_per_epoch:
            better = next(b for b in range(order.batch, 0, -1) if not 0 < order.length % b < self.local.sites)
            raise LoopError(
                f"The last batch of an epoch has fewer samples than there are sites ({self.local.sites}).",
                f"The last step of every epoch of {order.length} samples has {smallest} of them: not one for every "
                "site.",
                f"--set batch={better}, or more data.",
            )
        sync.split(self.mesh, (self.number * share, (self.number + 1) * share))
        self.context.step_sync.switch_group(self.mesh.world, self._ask)
        self.models.buffers.group = self.mesh.data
        self.is_split, self._split_at = True, self.met
        if self.models.trained:
            self._add_parameters()

    def _add_parameters(self) -> None:
        """Synchronize new parameters as well. Their anchors are their values, which are equal in all sites."""
        known = {id(p) for fragment in self.fragments for p in fragment.params}
        fresh = set(map(id, self.models.trained)) - known
        named = []
        for i, module in enumerate(self.models.modules):
            for name, p in module.named_parameters():
                if id(p) in fresh:  # only once, if several models have it
                    fresh.remove(id(p))
                    named.append((f"{i}.{name}", p))
        if not self.is_split or not named:
            return
        count = len(self.fragments)
        if not known and len(named) < count:
            raise LoopError(
                f"Cannot divide the model into {plural(count, 'fragment')}.",
                f"It has {plural(len(named), 'parameter')} that train.",
                f"--set local_sgd.num_fragments={len(named)}",
            )
        stretches = [list(range(len(named)))]
        if not known:
            stretches = self._saved_fragments(named) or fragments_of([p.numel() for _, p in named], count)
        anchors, velocities = self._saved.get("anchors", {}), self._saved.get("velocities", {})
        for fragment, stretch in zip(self.fragments[-len(stretches) :], stretches, strict=True):
            for name, p in (named[number] for number in stretch):
                fragment.add(name, p, anchors.get(name, p), velocities.get(name))
        if not known:
            self._resume_fragments()

    # -- a synchronization

    def _send(self, fragment: ModelFragment, step: StepState, agreed: Mapping[str, int]) -> None:
        """Send the change of this site's weights, and a few flags."""
        rows = fragment.pseudo_gradients()
        whole = all(bool(torch.isfinite(row).all()) for row in rows)
        words = [VERBS.index(STEP), step.number, agreed["stop"], agreed["leave"], whole, *step.sums[LOSS]]
        left = fragment.residuals(rows, self.mesh.world) if self.local.bits < 32 else ()
        fragment.letters = self.transport.send(words, rows, self.local.bits, left)
        fragment.due = step.number + 1 + self.local.sync_delay

    def _receive(self, fragment: ModelFragment) -> Mapping[str, int]:
        """Run the outer step with the values of all sites. Return the flags on which all sites agree."""
        self._settle(fragment)
        assert fragment.arrived is not None
        (words, rows), fragment.arrived = fragment.arrived, None
        fragment.step(rows, MERGE_ALPHA if self.local.sync_delay else 0.0)
        return {"stop": int(sum(said[2] for said in words)), "leave": int(sum(said[3] for said in words))}

    def _settle(self, fragment: ModelFragment) -> None:
        """Wait for a pending result. It is applied when it is due."""
        if fragment.letters is None:
            return
        words = fragment.letters.heard()
        self._check(STEP, words)
        broken = [site for site, said in enumerate(words) if not said[4]]
        if broken:
            raise LoopError(
                f"Cannot synchronize the sites after step {int(words[0][1])}: weights are not finite.",
                f"Site {broken[0]} of {len(words)} has weights that are not finite.",
                "lower the learning rate, or clip (--set clip=1.0).",
            )
        fragment.arrived = words, fragment.letters.means(kinds(fragment.sent_anchors))
        fragment.letters = None

    def _ask(self, verb: str) -> None:
        """Check that every site makes this call, one of VERBS. Raise LoopError on all of them if not."""
        with wrap_peer_errors(verb):
            self._check(verb, self.transport.tell([VERBS.index(verb), *[0.0] * 6]))

    def _check(self, verb: str, words: Sequence[Sequence[float]]) -> None:
        doing = [VERBS[int(said[0])] for said in words]
        if set(doing) != {verb}:
            others = " and ".join(f"site {site} at {other}" for site, other in enumerate(doing))
            raise LoopError(
                f"Site {self.number} reached {verb}, which all {len(words)} sites do together.",
                f"They are not in the same place: {others}.",
                "call the verbs of the run in every site. Between two meetings step.loss and what follows from it are "
                "a site's own: decide by the number of the step, and end with run.stop().",
            )

    # -- united sites

    @contextmanager
    def as_one(self, models: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Return a block in which these models have the mean of the sites' weights and buffers."""
        if not self.is_split:
            yield
            return
        with wrap_peer_errors(MEETING):
            self._unite(models)
        try:
            yield
        finally:
            own, self._own = self._own, {}
            for tensor in _tensors(models):
                if id(tensor) in own:
                    tensor.data.copy_(own[id(tensor)])

    def finish(self, step: StepState | None) -> None:
        """Leave all sites with the mean of their weights, and the loss of all sites. `step`: the last one."""
        if not self.is_split:
            return
        with phases.phase("exchange"), wrap_peer_errors(MEETING):
            self._unite([*self.models.modules, *self.models.tracked])
            self._own = {}
            if step is not None:
                sums = self.across.all_gather_object(list(step.sums[LOSS]))
                step.sums = {**step.sums, LOSS: (sum(total for total, _ in sums), sum(weight for _, weight in sums))}

    def _unite(self, models: Sequence[torch.nn.Module]) -> None:
        """Replace tensors that differ between the sites by their mean; `_own` keeps this site's values.

        `.data` has a version counter of its own, so no check takes this for a change by the script.
        """
        for fragment in self.fragments:
            self._settle(fragment)
        tensors = _tensors(models)
        marks = self.across.all_gather_object(tensor_hashes(map(to_local, tensors), ordered=True))
        unlike = [t for t, *others in zip(tensors, *marks, strict=True) if len(set(others)) > 1]
        self._own = {id(tensor): tensor.detach().clone() for tensor in unlike}
        numbers = [t for t in unlike if t.is_floating_point() or t.is_complex()]
        self.across.broadcast_([t.data for t in unlike if not (t.is_floating_point() or t.is_complex())])
        if not numbers:
            return
        parts = [as_real(tensor) for tensor in numbers]
        letters = self.transport.send([], concatenate(parts, self.mesh.world.device), 32)
        means = letters.means(kinds(parts))
        for tensor, mean in zip(numbers, unflatten(means, parts), strict=True):
            tensor.data.copy_(torch.view_as_complex(mean) if tensor.is_complex() else mean)

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return anchors and velocities, which all sites share; pending results; and the own state of each site.

        All processes call this together, with united sites.
        """
        if not self.is_split:
            return {}
        for fragment in self.fragments:
            self._settle(fragment)
        under_way = [
            f.arrived
            and {"due": f.due, "words": f.arrived[0], "means": f.named(unflatten(f.arrived[1], f.sent_anchors))}
            for f in self.fragments
        ]
        left = [fragment.whole_left(self.mesh.world) for fragment in self.fragments]
        return {
            "sites": self.local.sites,
            "fragments": [fragment.names for fragment in self.fragments],
            "anchors": {name: a for f in self.fragments for name, a in f.named(f.anchors).items()},
            "velocities": {name: v for f in self.fragments for name, v in f.named(f.velocities).items()},
            "under_way": under_way,
            "own": self._gathered({"left": left, "bits": self.local.bits, **self._of_this_site()}),
        }

    def _of_this_site(self) -> dict[str, Any]:
        """Return all tracked objects but models, and those tensors of models that differ from the other sites."""
        weights: dict[str, dict[str, torch.Tensor]] = {}
        for name, model in self.state.models.items():
            named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
            saved = model.state_dict().keys()
            weights[name] = {key: self._own[id(t)] for key, t in named if id(t) in self._own and key in saved}
        things = {
            name: thing.state_dict()
            for name, thing in self.state.tracked.items()
            if name not in (RANDOM, EXCHANGE) and name not in weights
        }
        return {"weights": weights, "things": things}

    def _gathered(self, mine: dict[str, Any]) -> list[Any]:
        """Return the state of every site, on the main process. The first process of each site sends it."""
        if self.mesh.world.rank:
            return []
        return gather_values(self.across, mine)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this state. This site's own state replaces that of the main process, when it is tracked.

        The state is ignored if the number of sites has changed.
        """
        if state["sites"] != self.local.sites:
            return
        own = state["own"][self.number]
        self._saved = {**state, "own": own}
        self.state.own = {**own["things"], **own["weights"]}

    def _saved_fragments(self, named: Sequence[tuple[str, torch.Tensor]]) -> list[list[int]]:
        """Return the fragments of the resumed run, or [] if it has none. Later parameters are in the last one."""
        before: list[list[str]] = self._saved.get("fragments", [])
        numbers = {name: number for number, (name, _) in enumerate(named)}
        found = [[numbers.pop(name) for name in names if name in numbers] for names in before]
        if len(found) != len(self.fragments):
            return []
        found[-1] += numbers.values()
        return found

    def _resume_fragments(self) -> None:
        """Resume pending results, and the residuals of quantization."""
        saved, self._saved = self._saved, {}
        if len(saved.get("under_way", [])) != len(self.fragments):  # other fragments have other steps
            return
        for fragment, was, left in zip(self.fragments, saved["under_way"], saved["own"]["left"], strict=True):
            sent = fragment.names[: len(was["means"])] if was is not None else []
            if sent and was["means"].keys() == set(sent):
                fragment.due, fragment.sent = was["due"], len(sent)
                rows = concatenate([was["means"][name] for name in sent], self.mesh.world.device)
                fragment.arrived = was["words"], rows
            if saved["own"]["bits"] == self.local.bits:
                length = [sum(a.numel() for a in fragment.anchors if a.dtype == dtype) for dtype in fragment.dtypes]
                rows = [row[:n].to(self.mesh.world.device) for n, row in zip(length, left, strict=False)]
                fragment.left = [chunk_of(row, self.mesh.world) for row in rows]


def _tensors(models: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Return all parameters and buffers of these models, each once."""
    return list({id(t): t for model in models for t in (*model.parameters(), *model.buffers())}.values())
