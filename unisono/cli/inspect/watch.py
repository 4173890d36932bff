"""unisono watch: serve the page of a run that makes progress, or of all runs in a folder."""

from __future__ import annotations

import errno
import getpass
import json
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from unisono.cli.request.run_dir import stop_run
from unisono.cli.request.suggestions import WHOLE
from unisono.environment import inherited, variables
from unisono.errors import SettingsError
from unisono.handshake.certificates import server_context
from unisono.security.audit_trail import Record
from unisono.security.file_modes import make_folder

if TYPE_CHECKING:
    import ssl

    from unisono.report.live.live_server import LiveServer, Note

LOOPBACK = "127.0.0.1"

NOTE = "\x1enote "
"""The beginning of a line for the launcher, from the server of `unisono run --watch`."""

LAST_SECONDS = 3.0
"""Seconds for which the server of `unisono run --watch` outlives the run, so that pages show its end."""

LONGEST_START = 5.0
"""Seconds for which a run waits for the address of its page."""


def watch(
    run: Path,
    /,
    *,
    address: Annotated[str, Parameter(metavar="IP")] = LOOPBACK,
    port: Annotated[int, WHOLE, Parameter(metavar="N", show_default=False)] = 0,
    stop: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    cert: Annotated[str, Parameter(metavar="FILE", show_default=False)] = "",
    key: Annotated[str, Parameter(metavar="FILE", show_default=False)] = "",
    beside: Annotated[bool, Parameter(negative=(), show=False)] = False,
) -> int:
    """Serve the report of a run while it grows, at an address that is printed. Ctrl-C ends it.

    The address contains a secret token with which one may look. Nothing is written, and training is not disturbed.

    Parameters
    ----------
    run
        A run directory, or a folder of them: a list, from which runs are opened or compared.
    address
        Listen at this address of the machine. Its network can then reach the page, without encryption unless --cert
        is given.
    port
        Listen at this port. By default any free one.
    stop
        Print a second address, whose token may also stop the run: it saves and ends. Only its user can do this, on the
        host of its launcher.
    cert
        Serve the page at https://, with the certificate of this host in a file in PEM format.
    key
        The file of the private key of --cert.
    """
    line = ["unisono", "watch", str(run), *(["--address", address] if address != LOOPBACK else [])]
    _check(run, stop=stop)
    tls = server_context(cert, key) if cert or key else None
    server = _server(run, address, port, line, stop=stop, note=_note_beside if beside else _print_note, tls=tls)
    with server:
        if beside:
            threading.Thread(target=_end_with_input, args=(server,), name="input", daemon=True).start()
        print(f"Watch {run} at {server.url}", flush=True)
        if server.stop_url:
            print(f"Watch and stop it at {server.stop_url}", flush=True)
        if tunnel := _tunnel(server, address):
            print(f"From your own machine, first: {tunnel}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def _check(run: Path, *, stop: bool) -> None:
    """Raise SettingsError if a path is neither a run directory nor a folder of them, or if it cannot be stopped."""
    from unisono.report.run_files import is_run, no_run  # here, because it loads numpy

    if stop and not is_run(run):
        facts = f"{run} is not a run directory, and --stop is for one run."
        line = shlex.join(["unisono", "watch", f"{run}/NAME", "--stop"])
        raise SettingsError("Cannot stop a folder of runs.", facts, line)
    if not is_run(run) and not (run.is_dir() and any(is_run(path) for path in run.iterdir())):
        raise SettingsError.of([no_run(run)])


def _server(
    run: Path, address: str, port: int, line: list[str], *, stop: bool, note: Note, tls: ssl.SSLContext | None
) -> LiveServer:
    from unisono.report.live.live_server import LiveServer, cannot_stop  # here, because it loads numpy

    def stop_it(client: str) -> str:
        return stop_run(run, reason="the live page", address=client)

    try:
        return LiveServer(run, address, port, stop=stop_it if stop else cannot_stop, note=note, tls=tls)
    except OverflowError:
        raise SettingsError(f"--port {port} is out of range.", "Ports are 0 to 65535.", shlex.join(line)) from None
    except OSError as error:
        reason = f"{error.strerror or error}."
        busy = error.errno in (errno.EADDRINUSE, errno.EACCES)
        do = (
            f"{shlex.join(line)} (with any free port)"
            if busy
            else f"{shlex.join(line[:3])} (on the loopback interface)"
        )
        raise SettingsError(f"Cannot listen at {address}, port {port}.", reason, do) from None


def _tunnel(server: LiveServer, address: str) -> str | None:
    """Return the command of a tunnel to the server; None if this is no session of ssh, or the server is not hidden."""
    session = variables(("SSH_CONNECTION",)).get("SSH_CONNECTION", "").split()
    if len(session) != 4 or address != LOOPBACK:
        return None
    port = server.server_port
    return shlex.join(["ssh", "-N", "-L", f"{port}:{LOOPBACK}:{port}", f"{getpass.getuser()}@{session[2]}"])


def _end_with_input(server: LiveServer) -> None:
    """Stop the server a moment after standard input ends: with the process that started it."""
    while sys.stdin.buffer.read(4096):
        pass
    time.sleep(LAST_SECONDS)
    server.shutdown()


def _print_note(event: str, address: str, reason: str) -> None:
    """Print a refusal or a stop."""
    print(f"{event.capitalize()}, {address}: {reason}.", file=sys.stderr, flush=True)


def _note_beside(event: str, address: str, reason: str) -> None:
    """Report a refusal to the launcher beside which this process serves. (A stop reaches it as a signal.)"""
    if event == "refusal":
        print(NOTE + json.dumps({"event": event, "address": address, "reason": reason}), flush=True)


@contextmanager
def watched(run_dir: Path, audit: Record) -> Iterator[None]:
    """Serve the page of a run during a block, from a process of its own. Print its address to standard error.

    Args:
        run_dir: The run directory.
        audit: Records those that the page refuses.
    """
    make_folder(run_dir / "timeline")
    words = [sys.executable, "-m", "unisono.cli.main", "watch", str(run_dir), "--beside"]
    environment = inherited({"PYTHONPATH": ":".join(path for path in sys.path if path)})
    server = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    ready = threading.Event()
    threading.Thread(target=_show, args=(server, ready, audit), name="watch", daemon=True).start()
    ready.wait(LONGEST_START)
    try:
        yield
    finally:
        assert server.stdin is not None
        server.stdin.close()


def _show(server: subprocess.Popen[str], ready: threading.Event, audit: Record) -> None:
    """Print what the server prints, and record what it refuses."""
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith(NOTE):
            audit(**json.loads(line.removeprefix(NOTE)))
            continue
        print(line, end="", file=sys.stderr, flush=True)
        ready.set()
    ready.set()
    server.wait()
