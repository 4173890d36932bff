"""Autograd hooks that notice when a bucket of gradients is complete, and the base class of exchanges that use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unisono.errors import LoopError
from unisono.exchange.base import Exchange
from unisono.exchange.buckets import BucketLayout
from unisono.exchange.gradient_accumulation import FlatGradient, LooseGradient


class BucketReadiness:
    """Count the gradients that autograd accumulates, and launch a bucket when all of its parameters have theirs.

    It counts how often each parameter's gradient is accumulated during one backward. Usually that is once;
    recomputation with a nested backward makes it more. A parameter is complete at the largest count that any backward
    has had, so in the first micro-batch of a run the hooks only count. Buckets are launched in a fixed order, because
    all processes must send the same sequence of messages.

    Args:
        layout: The buckets.
        launch: Called with the number of a bucket that is complete in the last micro-batch of a step. None: nothing is
            launched.
        complete: Called with the numbers of parameters that are complete, in micro-batches that ask for it: one by
            one, or all of a bucket whose gradients are batched.
    """

    def __init__(
        self,
        layout: BucketLayout,
        launch: Callable[[int], None] | None = None,
        complete: Callable[[Sequence[int]], object] = lambda numbers: None,
    ) -> None:
        self.layout = layout
        self.launch, self.complete = launch, complete
        self.used = [False] * len(layout.params)
        self.touched = False
        self.expected = [0] * len(layout.params)
        self.fired = [0] * len(layout.params)
        self.next = 0
        """The first bucket that has not been launched in this step."""
        self.target: FlatGradient | LooseGradient | None = None
        self._may_launch = self._notifies = self._launches = self._last = False
        self._missing: list[int] = []
        self._handles = [
            p.register_post_accumulate_grad_hook(self._hook_of(number)) for number, p in enumerate(layout.params)
        ]

    def _hook_of(self, number: int) -> Callable[[torch.Tensor], None]:
        bucket = self.layout.bucket_of[number]

        def on_gradient(p: torch.Tensor) -> None:
            if self.target is None:  # the parameter is in several exchanges, and it is another one's turn
                return
            self.target.fill(number, p)
            self.used[number] = True
            self.fired[number] += 1
            if not (self._notifies or self._launches):
                return
            if self.fired[number] > self.expected[number] > 0 and (self._notifies or bucket < self.next):
                self.refuse_varying(number)
            if self.fired[number] != self.expected[number]:
                return
            self._missing[bucket] -= 1
            if self._notifies:
                if not self.layout.batched[bucket]:
                    self.complete((number,))
                elif not self._missing[bucket]:
                    self.complete(self.layout.buckets[bucket].members)
            if self._launches:
                while self.next < len(self._missing) and self._missing[self.next] == 0:
                    ready, self.next = self.next, self.next + 1  # before a call that lets another thread run
                    self.target.flush(ready)
                    self.launch(ready)  # type: ignore[misc]

        return on_gradient

    def refuse_varying(self, number: int) -> None:
        """Raise LoopError for a gradient that was accumulated after it had been added to others."""
        shape = tuple(self.layout.params[number].shape)
        raise LoopError(
            f"A parameter of shape {shape} received another gradient after its sum had been sent.",
            f"It was accumulated {self.fired[number]} times in this backward, never more than "
            f"{self.expected[number]} times before: the same layer is recomputed a varying number of times.",
            "use torch.utils.checkpoint with use_reentrant=False, which accumulates each parameter once.",
        )

    def begin(self) -> None:
        """Begin a step: nothing is used, touched or launched.

        In the first step no bucket leaves before its last backward is over. An error in the model is then raised by
        every process, and none of them reports a lost peer instead.
        """
        self._may_launch = any(self.expected)
        self.used = [False] * len(self.used)
        self.touched = False
        self.next = 0

    def enter(self, target: FlatGradient | LooseGradient, *, notify: bool, last: bool, launch: bool) -> None:
        """Begin a micro-batch.

        Args:
            target: Where its gradient is gathered.
            notify: Call `complete` for each parameter that is complete.
            last: Whether it is the last micro-batch of the step.
            launch: Launch buckets as soon as they are complete.
        """
        self.target = target
        target.attach(self.layout.params)
        self.fired = [0] * len(self.fired)
        self._notifies, self._last = notify and any(self.expected), last
        self._launches = launch and self._may_launch and self.launch is not None
        if self._notifies or self._launches:
            self._missing = [len(bucket.members) for bucket in self.layout.buckets]

    def leave(self) -> None:
        """End a micro-batch. Raise LoopError if the loop has changed p.grad, and it was not the last one."""
        if self.target is not None:
            self.target.flush_all()
            if not self.target.untouched(self.layout.params):
                if not self._last:
                    raise gradient_modified_error()
                self.touched = True
        self.target, self._notifies, self._launches, self._last = None, False, False, False
        self.expected = [max(pair) for pair in zip(self.expected, self.fired, strict=True)]

    def launch_rest(self) -> None:
        """Launch the buckets that have not been launched in this step."""
        while self.launch is not None and self.next < len(self.layout.buckets):
            self.next += 1
            self.launch(self.next - 1)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def gradient_modified_error() -> LoopError:
    return LoopError(
        "The gradient was changed between two micro-batches.",
        "There p.grad holds what this process has added up so far: another number of processes would change another "
        "sum. (Clipping, noise, zero_grad(set_to_none=False), or a hook that runs after accumulation does this.)",
        "change p.grad after `for batch in step:`, where it is the mean gradient; clip with "
        "step.update(optimizer, clip=1.0).",
    )


class BucketedExchange(Exchange):
    """Base class of an exchange that gathers gradients in buckets."""

    ready: BucketReadiness

    @property
    def used(self) -> Sequence[bool]:
        return self.ready.used

    @property
    def touched(self) -> bool:
        return self.ready.touched

    def close(self) -> None:
        self.ready.close()
        self.zero()
