"""The connections of an asynchronous server: a link to each worker, with a thread for each.

    worker --- "here is the gradient of step 7" --->  thread  --->  inbox  --->  the loop, when it has time
           <-- new parameters, "yours is step 9" ---  thread  <---  outbox <---

A thread waits for its worker's message, then for the loop's answer, and so on in turn. So a worker that hangs blocks
one thread only, and an answer is sent while the loop continues.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from unisono.param_server.tcp_link import TcpLink

LINGER_SECONDS = 2.0
"""Seconds between the message that the run is over and the end of the links. Workers check for messages between two
micro-batches."""


class Message(NamedTuple):
    """A message from a worker, or to it. An empty `about`: the worker is gone."""

    worker: int
    about: Mapping[str, Any]
    tensors: Sequence[torch.Tensor] = ()


class WorkerConnections:
    """Receive messages of all workers, and answer each one.

    links    the links to every worker, by rank
    others   the links to other servers. Their messages are no requests, and need no answer
    is_over  whether workers have received the message that the run is over
    """

    def __init__(self, links: Mapping[int, TcpLink], others: Mapping[int, TcpLink] = MappingProxyType({})) -> None:
        self.links, self.others = links, others
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # a signal handler may put something in
        self._outboxes: dict[int, queue.SimpleQueue[Message | None]] = {rank: queue.SimpleQueue() for rank in links}
        self.is_over = False
        self._threads = [
            threading.Thread(target=self._attend, args=(rank, link), name=f"worker {rank}", daemon=True)
            for rank, link in links.items()
        ]
        self._threads += [
            threading.Thread(target=self._listen, args=(rank, link), name=f"server {rank}", daemon=True)
            for rank, link in others.items()
        ]
        for thread in self._threads:
            thread.start()

    def receive(self, seconds: float | None) -> Message | None:
        """Return the next message. Return None after a call of `notify`, or if none arrives within `seconds`."""
        try:
            return self._inbox.get(timeout=seconds)
        except queue.Empty:
            return None

    def notify(self) -> None:
        """End a `receive` that waits. A signal handler may call it."""
        self._inbox.put(None)

    def answer(self, message: Message) -> None:
        """Send a message to a worker that waits for it. The tensors must not change from now on."""
        self._outboxes[message.worker].put(message)

    def finish(self) -> None:
        """Send all workers the message that the run is over. The links stay: a worker may still be computing."""
        if not self.is_over:
            self.is_over = True
            for rank, link in self.links.items():
                link.tell({"over": True})
                self._outboxes[rank].put(None)

    def close(self) -> None:
        """Close all links, once all workers have left, or after LINGER_SECONDS."""
        self.finish()
        deadline = time.monotonic() + LINGER_SECONDS
        for thread in self._threads[: len(self.links)]:
            thread.join(max(deadline - time.monotonic(), 0))
        for link in self.others.values():
            link.close()
        for rank, link in self.links.items():
            self._outboxes[rank].put(None)
            link.close()
        for thread in self._threads:
            thread.join(1.0)

    def _attend(self, rank: int, link: TcpLink) -> None:
        try:
            while True:
                message = Message(rank, *link.receive())
                self._inbox.put(message)
                if "bye" in message.about:
                    return
                answer = self._outboxes[rank].get() or Message(rank, {"over": True})
                link.send(answer.about, answer.tensors)
        except (OSError, ValueError):  # the worker is gone, or its message was cut off
            self._inbox.put(Message(rank, {}))

    def _listen(self, rank: int, link: TcpLink) -> None:
        try:
            while True:
                self._inbox.put(Message(rank, *link.receive()))
        except (OSError, ValueError):
            self._inbox.put(Message(rank, {}))
