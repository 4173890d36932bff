"""Faults: what goes wrong in a real run, made to happen at one place of it.

    with FailAt(2, "backward") if world.rank == 1 else nullcontext():
        script.main(run)

Each is a block, and acts through `phases`: as soon as its process enters (or, `when="ends"`, leaves) that phase of that
step, it strikes, once; a fault without a step strikes in every one. `virtual_rank` waits for a round of that one.

    FailAt        the process is gone: killed, crashed, with an exception, or in peace
    HangAt        it does nothing more: it sleeps, spins, holds the interpreter, or is stopped by the system
    SlowAt        it takes some times as long for all it computes
    BitFlip       one bit of an output, of the gradient or of the weights is another one, and nobody says so
    TornFile      a file that was just written ends in the middle
    FullDisk      files cannot grow any more
    LostPackets   what others send does not arrive, now and then or at all

Nothing here pretends: the system's own means are used (signals, limits, filters of sockets), so what is tested is what
a user meets. They cannot be undone from outside either: a process that was killed is dead.
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
    """Something that goes wrong as a phase of a step begins or ends.

    step          counted from 0; None: in every step
    phase         one of phases.PHASES; None: any
    when          as the phase begins, or as it ends
    virtual_rank  only in a round of this one
    """

    step: int | None = field(default=None, kw_only=False)
    phase: str | None = field(default="forward", kw_only=False)
    when: Literal["begins", "ends"] = "begins"
    virtual_rank: int | None = None
    mark: Callable[[], None] | None = field(default=None, repr=False)
    """Called before it strikes: who plays a fault once must know of it, even if nothing of the process is left."""
    _struck_in: int = field(default=-1, init=False, repr=False)
    _waits: bool = field(default=False, init=False, repr=False)  # its place has come, and it could not strike yet

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
        """Do it."""

    def is_possible(self) -> bool:
        """Can it be done now? Otherwise it is tried again at every change of phase."""
        return True

    def heal(self) -> None:  # noqa: B027  (most leave nothing behind)
        """Undo it, where that is possible: the block is over."""

    def _change(self, left: str, entered: str) -> None:
        if not self._waits and self._is_place(entered if self.when == "begins" else left):
            self._waits, self._struck_in = True, phases.Position.step or 0
        if self._waits and self.is_possible():
            self._waits = False
            if self.mark is not None:
                self.mark()
            self.strike()

    def _is_place(self, phase: str) -> bool:
        step, virtual_rank = phases.Position.step, phases.Position.virtual_rank
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
    """This process is gone.

    kind   kill: SIGKILL, as by the system when memory ends; crash: SIGSEGV, as in compiled code; error: an exception;
           exit: os._exit(0), which looks like peace
    later  seconds after the phase has begun, from a thread: in the middle of whatever the process does then
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
        ways: dict[str, Callable[[], None]] = {
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "crash": _crash,
            "error": _raise,
            "exit": lambda: os._exit(0),
        }
        ways[self.kind]()


def _crash() -> None:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # faulthandler would print every stack first
    os.kill(os.getpid(), signal.SIGSEGV)


def _raise() -> None:
    raise PlantedFailure(f"a planted failure in step {phases.Position.step}")


@dataclass(kw_only=True)
class HangAt(Fault):
    """This process does nothing more, for `seconds`.

    kind  sleep: it waits, and its threads live; spin: it computes for nothing; hold: compiled code keeps the
          interpreter, so that none of its threads gets to run; stop: the system does not run it at all (SIGSTOP, for
          ever)
    """

    kind: Literal["sleep", "spin", "hold", "stop"] = "sleep"
    seconds: float = math.inf

    def strike(self) -> None:
        ways: dict[str, Callable[[float], None]] = {
            "sleep": sleep,
            "spin": _spin,
            "hold": _hold,
            "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
        }
        ways[self.kind](self.seconds)


def sleep(seconds: float = math.inf) -> None:
    """time.sleep, also for ever."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 3600.0))


def _spin(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def _hold(seconds: float) -> None:
    """A call into C through PyDLL, which, unlike CDLL, does not let go of the interpreter."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        ctypes.PyDLL(None).sleep(math.ceil(min(left, 1e6)))


class SlowAt:
    """A fault: this process takes `times` as long as it would, for all that it computes while the block lasts.

        with SlowAt(3.0) if world.rank == 1 else nullcontext():
            script.main(run)

    It acts through `phases`: whenever one of these ends, it sleeps for as much longer as the phase has taken, but for
    what was waiting for others. `times` may be changed from step to step.
    """

    def __init__(self, times: float, *, during: Collection[str] = ("data", "forward", "backward")) -> None:
        self.times, self.during = times, during
        self._began = self._waited = 0.0

    def __enter__(self) -> SlowAt:
        self._look()
        phases.observe(self._change)
        return self

    def __exit__(self, *_: Any) -> None:
        phases.unobserve(self._change)

    def _change(self, left: str, entered: str) -> None:
        if left in self.during:
            took = time.perf_counter() - self._began - (phases.CommWait.seconds - self._waited)
            time.sleep(max(took * (self.times - 1), 0.0))
        self._look()

    def _look(self) -> None:
        self._began, self._waited = time.perf_counter(), phases.CommWait.seconds


HIGHEST = -10
"""The highest bit of the mantissa of float32 and bfloat16: the number changes by a third or a half."""


def flip_(tensor: torch.Tensor, element: int = 0, bit: int = HIGHEST) -> None:
    """Make one bit of a tensor another one, in place, behind autograd's back. Of a DTensor: of what lies here.

    element  which, in the order of rows
    bit      of this element, 0 is the lowest one of the mantissa, -1 the sign
    """
    import torch

    raw = tensor.detach()
    raw = (raw.to_local() if hasattr(raw, "to_local") else raw).data  # .data: its own count of changes
    place = [int(i) for i in torch.unravel_index(torch.tensor(element % raw.numel()), raw.shape)]
    one = raw[tuple(place)].as_strided((1,), (1,))
    bit %= 8 * one.element_size()
    one.view(torch.uint8)[bit // 8] ^= 1 << (bit % 8)


@dataclass(kw_only=True)
class BitFlip(Fault):
    """One bit is another one, as a processor or a memory with a defect makes it. Nobody says so.

    of       output: of the first layer that computes then; weights: of the model that is called then, on this process;
             gradient: of what this process is about to step with, when it is the same everywhere already
    element  which number of the tensor (of the first parameter that has one)
    bit      which bit of it, 0 is the lowest one, -1 the sign
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
        from torch.nn.modules import module  # a second, and only this fault needs it

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
    """The file in `folder` that was written last, of those that match; None: there is none."""
    found = []
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):  # somebody may clear up
            found.append((path.stat().st_mtime_ns, path))
    return max(found, default=(0, None))[1]


def tear(path: Path, keep: float = 0.5) -> None:
    """Cut a file off: this part of it stays, as after a power cut or a copy that broke off."""
    os.truncate(path, int(path.stat().st_size * keep))


def flip_bit(path: Path, place: float = 0.5, bit: int = 0) -> None:
    """Make one bit of a file another one; place: where, 0 is its beginning, 1 its end."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        where = min(int(size * place), size - 1)
        file.seek(where)
        (byte,) = file.read(1)
        file.seek(where)
        file.write(bytes([byte ^ (1 << bit)]))


@dataclass(kw_only=True)
class TornFile(Fault):
    """The newest file of `folder` that matches `pattern` is cut off, as soon as there is one.

    keep  the part of it that stays
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
    """No file of this process can grow beyond `bytes`, for so many steps.

    The system's own limit (RLIMIT_FSIZE) does it, without privileges and without filling anybody's disk: a write fails
    half done, with EFBIG where a full disk says ENOSPC. It holds for files in shared memory, too.
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
        if self._before is not None and (phases.Position.step or 0) >= self._struck_in + self.steps:
            self.heal()


@dataclass(kw_only=True)
class LostPackets(Fault):
    """Of what arrives at this process by TCP from then on, this share is lost: 0.01 is a bad line, 1.0 a host that is
    gone without a word, so that no connection breaks.

    A filter of one's own sockets (SO_ATTACH_FILTER, Linux; any process may set it) drops segments before TCP sees them,
    and TCP sends them again, as it does on a line. Sockets that are opened later are whole.

    steps  for so many steps
    """

    share: float = 1.0
    steps: float = math.inf
    _deaf: bool = field(default=False, init=False, repr=False)

    def strike(self) -> None:
        self._deaf = True
        for line in _lines():
            _filter(line, self.share)

    def heal(self) -> None:
        if self._deaf:
            self._deaf = False
            for line in _lines():
                with contextlib.suppress(OSError):  # it was opened later, so there is no filter
                    line.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)

    def _change(self, left: str, entered: str) -> None:
        super()._change(left, entered)
        if self._deaf and (phases.Position.step or 0) >= self._struck_in + self.steps:
            self.heal()


SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
"""asm-generic/socket.h; the same on x86 and ARM."""

RANDOM = 0xFFFFF000 + 56
"""SKF_AD_OFF + SKF_AD_RANDOM (linux/filter.h): where a filter reads a random number of 32 bits."""


def _lines() -> Iterator[socket.socket]:
    """This process's TCP connections, whoever opened them."""
    for number in os.listdir("/proc/self/fd"):
        try:
            line = socket.socket(fileno=os.dup(int(number)))
        except OSError:  # no socket, or the descriptor of the listing itself
            continue
        with line:
            if line.family in (socket.AF_INET, socket.AF_INET6) and line.type == socket.SOCK_STREAM:
                yield line


def _filter(line: socket.socket, share: float) -> None:
    """Let `share` of what arrives be dropped: four instructions of the classic packet filter (bpf(4))."""
    limit = min(int(share * 2**32), 2**32 - 1)
    program = [
        (0x20, 0, 0, RANDOM),  # load a random number
        (0x35, 1, 0, limit),  # at least `limit`? skip one
        (0x06, 0, 0, 0),  # drop
        (0x06, 0, 0, 0xFFFFFFFF),  # keep all of it
    ]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    memory = ctypes.create_string_buffer(code)
    line.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(memory)))
