"""Fault injection: failures of real runs, at a given place of the run.

    with FailAt(2, "backward") if world.rank == 1 else nullcontext():
        script.main(run)

Each fault is a context manager that observes `phases`. It happens once, when its process enters (or, with
`when="ends"`, leaves) that phase of that step; without a step, it happens in every step. With `virtual_rank`, it waits
for a micro-batch of that virtual rank.

    FailAt        the process ends: killed, crashed, with an exception, or with status 0
    HangAt        the process makes no progress: it sleeps, spins, holds the GIL, or is stopped by the system
    SlowAt        the process computes more slowly by a factor
    BitFlip       one bit of an output, the gradient or the weights is flipped silently
    TornFile      a file that was just written is truncated
    FullDisk      files cannot grow
    LostPackets   some or all packets from other processes are lost

Faults use the means of the system (signals, limits, socket filters), so that tests meet the same failures as users.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import signal
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from unisono import phases

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True)
class Fault(ABC):
    """A failure at the beginning or the end of a phase of a step.

    Args:
        step: counted from 0; None for every step.
        phase: one of phases.PHASES; None for any.
        when: at the beginning or at the end of the phase.
        virtual_rank: only in a micro-batch of this virtual rank.
    """

    step: int | None = field(default=None, kw_only=False)
    phase: str | None = field(default="forward", kw_only=False)
    when: Literal["begins", "ends"] = "begins"
    virtual_rank: int | None = None
    mark: Callable[[], None] | None = field(default=None, repr=False)
    """Called before the fault happens, so that a fault can be recorded even if it ends the process."""
    _struck_in: int = field(default=-1, init=False, repr=False)
    _waits: bool = field(default=False, init=False, repr=False)  # it is due, but not yet possible

    def __post_init__(self) -> None:
        if self.phase is not None and self.phase not in phases.PHASES:
            raise ValueError(f"phase is {self.phase!r}; there are {', '.join(phases.PHASES)}")

    def __enter__(self) -> Fault:
        phases.observe(self._change)
        return self

    def __exit__(self, *_: Any) -> None:
        phases.unobserve(self._change)
        self.heal()

    @abstractmethod
    def strike(self) -> None:
        """Cause the failure."""

    def is_possible(self) -> bool:
        """Return whether the failure is possible now. Otherwise it is tried again at every change of phase."""
        return True

    def heal(self) -> None:  # noqa: B027  (most faults have nothing to undo)
        """Undo the fault at the end of the block, if that is possible."""

    def _change(self, left: str, entered: str) -> None:
        if not self._waits and self._is_place(entered if self.when == "begins" else left):
            self._waits, self._struck_in = True, phases.position.step or 0
        if self._waits and self.is_possible():
            self._waits = False
            if self.mark is not None:
                self.mark()
            self.strike()

    def _is_place(self, phase: str) -> bool:
        step, virtual_rank = phases.position.step, phases.position.virtual_rank
        return (
            step not in (None, self._struck_in)
            and self.step in (None, step)
            and self.phase in (None, phase)
            and self.virtual_rank in (None, virtual_rank)
        )


class PlantedFailure(RuntimeError):
    """The exception of FailAt(kind="error")."""


@dataclass(kw_only=True)
class FailAt(Fault):
    """The process ends.

    Args:
        kind: kill: SIGKILL, as by the OOM killer; crash: SIGSEGV, as in compiled code; error: an exception; exit:
            os._exit(0), which looks like success.
        later: seconds after the phase began, from a thread.
    """

    kind: Literal["kill", "crash", "error", "exit"] = "kill"
    later: float = 0.0

    def strike(self) -> None:
        if self.later:
            timer = threading.Timer(self.later, self._fail)
            timer.daemon = True
            timer.start()
        else:
            self._fail()

    def _fail(self) -> None:
        actions: dict[str, Callable[[], None]] = {
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "crash": _crash,
            "error": _raise,
            "exit": lambda: os._exit(0),
        }
        actions[self.kind]()


def _crash() -> None:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # otherwise faulthandler prints all stacks first
    os.kill(os.getpid(), signal.SIGSEGV)


def _raise() -> None:
    raise PlantedFailure(f"an injected failure in step {phases.position.step}")


@dataclass(kw_only=True)
class HangAt(Fault):
    """The process makes no progress.

    Args:
        kind: sleep: it waits, and its threads run; spin: it uses the processor; hold: compiled code holds the GIL, so
            that no thread runs; stop: SIGSTOP, without a time limit.
        seconds: how long.
    """

    kind: Literal["sleep", "spin", "hold", "stop"] = "sleep"
    seconds: float = math.inf

    def strike(self) -> None:
        actions: dict[str, Callable[[float], None]] = {
            "sleep": sleep,
            "spin": _spin,
            "hold": _hold,
            "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
        }
        actions[self.kind](self.seconds)


def sleep(seconds: float = math.inf) -> None:
    """Sleep, also for an infinite time."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 3600.0))


def _spin(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def _hold(seconds: float) -> None:
    """Sleep in C code that holds the GIL: PyDLL, unlike CDLL, does not release it."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        ctypes.PyDLL(None).sleep(math.ceil(min(left, 1e6)))


class SlowAt:
    """A fault that makes the process `times` slower while the block lasts.

        with SlowAt(3.0) if world.rank == 1 else nullcontext():
            script.main(run)

    At the end of each of these phases it sleeps in proportion to the time of the phase, without the time that was
    spent waiting for other processes. `times` may be changed between steps.
    """

    def __init__(self, times: float, *, during: Collection[str] = ("data", "forward", "backward")) -> None:
        self.times, self.during = times, during
        self._began = self._waited = 0.0

    def __enter__(self) -> SlowAt:
        self._start_timer()
        phases.observe(self._change)
        return self

    def __exit__(self, *_: Any) -> None:
        phases.unobserve(self._change)

    def _change(self, left: str, entered: str) -> None:
        if left in self.during:
            took = time.perf_counter() - self._began - (phases.CommWait.seconds - self._waited)
            time.sleep(max(took * (self.times - 1), 0.0))
        self._start_timer()

    def _start_timer(self) -> None:
        self._began, self._waited = time.perf_counter(), phases.CommWait.seconds


HIGHEST = -10
"""The highest mantissa bit of float32 and bfloat16. The value changes by a third to a half."""


def flip_(tensor: torch.Tensor, element: int = 0, bit: int = HIGHEST) -> None:
    """Flip one bit of a tensor in place, without autograd noticing. For a DTensor, the local part.

    Args:
        tensor: the tensor.
        element: the index of the element, in row-major order.
        bit: the bit of this element; 0 is the lowest mantissa bit, -1 the sign.
    """
    import torch

    raw = tensor.detach()
    raw = (raw.to_local() if hasattr(raw, "to_local") else raw).data  # .data has a version counter of its own
    place = [int(i) for i in torch.unravel_index(torch.tensor(element % raw.numel()), raw.shape)]
    one = raw[tuple(place)].as_strided((1,), (1,))
    bit %= 8 * one.element_size()
    one.view(torch.uint8)[bit // 8] ^= 1 << (bit % 8)


@dataclass(kw_only=True)
class BitFlip(Fault):
    """One bit is flipped silently, as by defective memory.

    Args:
        of: output: of the next layer that computes; weights: of the next model that is called, on this process;
            gradient: the reduced gradient, before the optimizer step of this process.
        element: the index in the tensor, or in the first parameter that requires a gradient.
        bit: the bit of this element; 0 is the lowest mantissa bit, -1 the sign.
    """

    of: Literal["output", "weights", "gradient"] = "output"
    element: int = 0
    bit: int = HIGHEST
    _armed: bool = field(default=False, init=False, repr=False)
    _model: Any = field(default=None, init=False, repr=False)
    _hooks: list[Any] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.of == "gradient":
            self.phase = "update"
        super().__post_init__()

    def __enter__(self) -> BitFlip:
        from torch.nn.modules import module  # here, because it takes a second

        self._hooks = [
            module.register_module_forward_pre_hook(self._called),
            module.register_module_forward_hook(self._computed),
        ]
        super().__enter__()
        return self

    def heal(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._model = None

    def strike(self) -> None:
        if self.of == "gradient":
            flip_(next(p.grad for p in self._model.parameters() if p.grad is not None), self.element, self.bit)
        else:
            self._armed = True

    def _called(self, module: torch.nn.Module, _: Any) -> None:
        if self._model is None or self.of == "weights":
            trained = (p for p in module.parameters() if p.requires_grad)
            first = next(trained, None)
            if first is not None and self._model is None:
                self._model = module
            if first is not None and self._armed and self.of == "weights":
                self._armed = False
                flip_(first, self.element, self.bit)

    def _computed(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        import torch

        if self._armed and self.of == "output" and isinstance(output, torch.Tensor) and output.is_floating_point():
            self._armed = False
            flip_(output, self.element, self.bit)


def newest(folder: Path, pattern: str) -> Path | None:
    """Return the most recently written matching file in `folder`; None if there is none."""
    found = []
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):  # it may have been removed
            found.append((path.stat().st_mtime_ns, path))
    return max(found, default=(0, None))[1]


def tear(path: Path, keep: float = 0.5) -> None:
    """Truncate a file to this fraction, as after a power failure."""
    os.truncate(path, int(path.stat().st_size * keep))


def flip_bit(path: Path, place: float = 0.5, bit: int = 0) -> None:
    """Flip one bit of a file; `place` is 0 at its beginning and 1 at its end."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        where = min(int(size * place), size - 1)
        file.seek(where)
        (byte,) = file.read(1)
        file.seek(where)
        file.write(bytes([byte ^ (1 << bit)]))


@dataclass(kw_only=True)
class TornFile(Fault):
    """The newest file of `folder` that matches `pattern` is truncated, as soon as there is one.

    Args:
        folder: the folder.
        pattern: a glob pattern.
        keep: the fraction that remains.
    """

    folder: Path = Path()
    pattern: str = "checkpoints/*/*.safetensors"
    keep: float = 0.5

    def is_possible(self) -> bool:
        return newest(Path(self.folder), self.pattern) is not None

    def strike(self) -> None:
        path = newest(Path(self.folder), self.pattern)
        assert path is not None
        tear(path, self.keep)


@dataclass(kw_only=True)
class FullDisk(Fault):
    """Files of this process cannot grow beyond `bytes`, for `steps` steps.

    The system limit RLIMIT_FSIZE needs no privileges and fills no disk. A write fails after a part of it, with EFBIG
    instead of the ENOSPC of a full disk. The limit applies to files in shared memory, too.
    """

    bytes: int = 0
    steps: float = math.inf
    _before: tuple[int, int] | None = field(default=None, init=False, repr=False)

    def strike(self) -> None:
        if self._before is None:
            self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.bytes, self._before[1]))

    def heal(self) -> None:
        if self._before is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._before)
            self._before = None

    def _change(self, left: str, entered: str) -> None:
        super()._change(left, entered)
        if self._before is not None and (phases.position.step or 0) >= self._struck_in + self.steps:
            self.heal()


@dataclass(kw_only=True)
class LostPackets(Fault):
    """A fraction of the TCP packets that arrive at this process is lost, for `steps` steps.

    A share of 0.01 is a bad network, and 1.0 a host that vanished without closing its connections. A socket filter
    (SO_ATTACH_FILTER, Linux, without privileges) drops segments before TCP sees them, and TCP sends them again as on a
    real network. Sockets that are opened later are not affected.
    """

    share: float = 1.0
    steps: float = math.inf
    _active: bool = field(default=False, init=False, repr=False)

    def strike(self) -> None:
        self._active = True
        for connection in _connections():
            _drop(connection, self.share)

    def heal(self) -> None:
        if self._active:
            self._active = False
            for connection in _connections():
                with contextlib.suppress(OSError):  # opened later, so it has no filter
                    connection.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)

    def _change(self, left: str, entered: str) -> None:
        super()._change(left, entered)
        if self._active and (phases.position.step or 0) >= self._struck_in + self.steps:
            self.heal()


SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
"""From asm-generic/socket.h; the same on x86 and ARM."""

RANDOM = 0xFFFFF000 + 56
"""SKF_AD_OFF + SKF_AD_RANDOM (linux/filter.h): the offset at which a filter reads a random 32-bit number."""


def _connections() -> Iterator[socket.socket]:
    """Yield all TCP connections of this process."""
    for number in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=os.dup(int(number)))
        except OSError:  # not a socket, or the descriptor of the listing itself
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                yield connection


def _drop(connection: socket.socket, share: float) -> None:
    """Drop a fraction of the incoming packets, by four instructions of the classic packet filter (bpf(4))."""
    limit = min(int(share * 2**32), 2**32 - 1)
    program = [
        (0x20, 0, 0, RANDOM),  # load a random number
        (0x35, 1, 0, limit),  # skip one instruction if it is at least `limit`
        (0x06, 0, 0, 0),  # drop
        (0x06, 0, 0, 0xFFFFFFFF),  # accept the whole packet
    ]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    memory = ctypes.create_string_buffer(code)
    connection.setsockopt(
        socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(memory))
    )
