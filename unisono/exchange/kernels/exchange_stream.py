"""A stream of its own for an exchange on an accelerator, so that waits and additions do not hold up backward.

    the loop's stream      backward of bucket 2      backward of bucket 1      backward of bucket 0    | join
                                      \\ event                 \\ event                 \\ event        |
    the exchange's stream               send 2                  send 1, add up 2         send 0, ...   |

With NCCL, to wait for a message is to let the current stream wait. On the loop's stream, the layers that backward has
still to compute would wait too.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class ExchangeStream:
    """Run blocks on a stream of their own, after the work that the current stream has been given.

    On the CPU, and where gradients are on several devices, blocks simply run.

    Args:
        devices: The devices of the gradients.
        streams: Has the classes and functions of torch.cuda for streams.
    """

    def __init__(self, devices: Iterable[torch.device], streams: Any = torch.cuda) -> None:
        self._streams, self._device = streams, next(iter(devices := set(devices)))
        on_one = len(devices) == 1 and self._device.type == "cuda"
        self._stream = streams.Stream(self._device) if on_one else None

    def block(self) -> AbstractContextManager[Any]:
        """Return a block that runs on the stream. It may read all that the current stream has been given before.

        Memory that the current stream has allocated, and that the block uses, must stay allocated until `join`.
        """
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(self._streams.current_stream(self._device))
        block: AbstractContextManager[Any] = self._streams.stream(self._stream)
        return block

    def join(self) -> None:
        """Let the current stream wait for all blocks until now."""
        if self._stream is not None:
            self._streams.current_stream(self._device).wait_stream(self._stream)
