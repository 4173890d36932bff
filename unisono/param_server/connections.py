"""The hub of an asynchronous run: the server's links to its workers, with a thread for each.

    worker --- "here is the gradient of step 7" --->  thread  --->  inbox  --->  the loop, when it has time
           <-- new parameters, "yours is step 9" ---  thread  <---  outbox <---

A thread waits for its worker's message, then for the answer that the loop has for it, and so on in turn. So a worker
that stands still keeps one thread waiting, and nobody else; and an answer is on its way while the loop goes on.
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
"""Before it closes its links, the server waits so long for workers that have not heard yet that it is over. They listen
between two micro-batches."""


class Message(NamedTuple):
    """What came from a worker. `about` is empty: it is gone."""

    worker: int
    about: Mapping[str, Any]
    tensors: Sequence[torch.Tensor] = ()


class WorkerConnections:
    """links   to every worker, by rank
    others  to other servers: what they say is no request, and goes to the inbox as it comes
    """

    def __init__(self, links: Mapping[int, TcpLink], others: Mapping[int, TcpLink] = MappingProxyType({})) -> None:
        self.links, self.others = links, others
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # a signal may put something in
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
        """The next letter; None: somebody has called `wake`, or so many seconds went by without one."""
        try:
            return self._inbox.get(timeout=seconds)
        except queue.Empty:
            return None

    def notify(self) -> None:
        """End a `receive` that waits. A signal's handler may call it."""
        self._inbox.put(None)

    def answer(self, letter: Message) -> None:
        """To a worker that waits for it. The tensors are not to be changed from now on."""
        self._outboxes[letter.worker].put(letter)

    def finish(self) -> None:
        """Tell all workers that it is over. The links stay: whoever computes still may hear of it later."""
        if not self.is_over:
            self.is_over = True
            for rank, link in self.links.items():
                link.tell({"over": True})
                self._outboxes[rank].put(None)

    def close(self) -> None:
        """Part, once all workers have, or after a moment."""
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
                letter = Message(rank, *link.receive())
                self._inbox.put(letter)
                if "bye" in letter.about:
                    return
                answer = self._outboxes[rank].get() or Message(rank, {"over": True})
                link.send(answer.about, answer.tensors)
        except (OSError, ValueError):  # it is gone, or what it said was cut off
            self._inbox.put(Message(rank, {}))

    def _listen(self, rank: int, link: TcpLink) -> None:
        try:
            while True:
                self._inbox.put(Message(rank, *link.receive()))
        except (OSError, ValueError):
            self._inbox.put(Message(rank, {}))
