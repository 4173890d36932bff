"""Prove to each other that both ends of a connection have the same secret, without sending it.

    listens                                                  connects
      name of the protocol, nonce L          ────────────▶
                                             ◀────────────   number, nonce C, HMAC("connects", number, L, C, purpose)
      HMAC("listens", number, L, C, purpose) ────────────▶

The key is the secret of the run, the function HMAC-SHA256 (RFC 2104). Each nonce is 32 random bytes, so a recorded
proof is of no use on another connection. The role is part of the proof, so an end cannot send back what it has
received. The purpose keeps a proof for one kind of port from another. The end that connects proves first: a stranger
that connects receives the name of the protocol and random bytes only. All messages have a fixed length, and proofs are
compared in constant time.

The handshake decides which programs may speak. It does not encrypt what follows: an attacker that can change packets
between two hosts can wait for the proof, and use the connection then.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time

PROOF_SECONDS = 10.0
"""Time limit for the handshake. A host under load may be slow; two round trips are not."""

PROTOCOL = b"UNISONO\x01"
"""What the end that listens sends first: the name, and the version of the handshake."""

NONCE_BYTES, PROOF_BYTES = 32, 32

_NUMBER = struct.Struct("!I")

GREETING_BYTES = len(PROTOCOL) + NONCE_BYTES
"""Bytes of the first message."""

ANSWER_BYTES = _NUMBER.size + NONCE_BYTES + PROOF_BYTES
"""Bytes of the second message."""

REFUSAL = bytes(PROOF_BYTES)
"""What the end that listens sends in place of its proof if that of the other end is wrong."""


class OtherProgramError(ConnectionError):
    """The other end of a connection is not a port of Unisono, or of another version of it."""


class OtherSecretError(ConnectionError):
    """The other end of a connection has another secret."""


class RunSecret:
    """The secret that all members of a run have. Its text form does not show it.

    Args:
        value: the secret. An empty one proves only that both ends are Unisono.
    """

    def __init__(self, value: bytes = b"") -> None:
        self._value = value

    @classmethod
    def random(cls) -> RunSecret:
        """Return a new secret of 32 random bytes."""
        return cls(secrets.token_bytes(32))

    @classmethod
    def from_hex(cls, text: str) -> RunSecret:
        """Return the secret that `hex` has written."""
        return cls(bytes.fromhex(text))

    def hex(self) -> str:
        """Return the secret as text, for a message over a channel that is private."""
        return self._value.hex()

    def proof(self, role: bytes, number: int, listens: bytes, connects: bytes, purpose: str) -> bytes:
        """Return the proof of one end.

        Args:
            role: `b"listens"` or `b"connects"`.
            number: the number that the end that connects states.
            listens: the nonce of the end that listens.
            connects: the nonce of the end that connects.
            purpose: the kind of port.
        """
        message = role.ljust(8) + _NUMBER.pack(number) + listens + connects + purpose.encode()
        return hmac.digest(self._value, message, "sha256")

    def derive(self, use: bytes) -> bytes:
        """Return a key of 32 bytes for another use: HKDF-SHA256 (RFC 5869) without a salt."""
        extracted = hmac.digest(bytes(32), self._value, "sha256")
        return hmac.digest(extracted, b"unisono " + use + b"\x01", "sha256")

    def __bool__(self) -> bool:
        return bool(self._value)

    def __repr__(self) -> str:
        return "RunSecret(...)" if self._value else "RunSecret()"


def greeting() -> tuple[bytes, bytes]:
    """Return the first message of the end that listens, and the nonce in it."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return PROTOCOL + nonce, nonce


def check_answer(secret: RunSecret, purpose: str, nonce: bytes, answer: bytes) -> tuple[int, bytes] | None:
    """Check the second message.

    Args:
        secret: the secret of the run.
        purpose: the kind of port.
        nonce: that of the greeting.
        answer: ANSWER_BYTES bytes.

    Returns:
        The number that the other end states, and the proof to send to it; None if its proof is wrong.
    """
    (number,), theirs = _NUMBER.unpack_from(answer), answer[_NUMBER.size : -PROOF_BYTES]
    if not hmac.compare_digest(answer[-PROOF_BYTES:], secret.proof(b"connects", number, nonce, theirs, purpose)):
        return None
    return number, secret.proof(b"listens", number, nonce, theirs, purpose)


def prove(
    connection: socket.socket, secret: RunSecret, purpose: str, number: int = 0, seconds: float = PROOF_SECONDS
) -> None:
    """Prove that this end of a new connection has the secret, and check the proof of the end that listens.

    Args:
        connection: the connection. Its time limit is the same afterward.
        secret: the secret of the run.
        purpose: the kind of port.
        number: the number of this member, below 2**32: of a node, an actor or a rank.
        seconds: time limit for the handshake.

    Raises:
        OtherProgramError: the other end speaks another protocol.
        OtherSecretError: the other end has another secret.
        OSError: the connection has ended, or the other end does not answer in time.
    """
    before, until = connection.gettimeout(), time.monotonic() + seconds
    try:
        first = _exactly(connection, GREETING_BYTES, until)
        if not first.startswith(PROTOCOL):
            raise OtherProgramError("another program, or another version of Unisono, answers there")
        theirs, mine = first[len(PROTOCOL) :], secrets.token_bytes(NONCE_BYTES)
        connection.sendall(_NUMBER.pack(number) + mine + secret.proof(b"connects", number, theirs, mine, purpose))
        answer = _exactly(connection, PROOF_BYTES, until)
        if not hmac.compare_digest(answer, secret.proof(b"listens", number, theirs, mine, purpose)):
            raise OtherSecretError("the other end has another secret")
    finally:
        connection.settimeout(before)


def _exactly(connection: socket.socket, count: int, until: float) -> bytes:
    """Receive this many bytes before the moment `until`."""
    found = b""
    while len(found) < count:
        connection.settimeout(max(until - time.monotonic(), 0.001))
        data = connection.recv(count - len(found))
        if not data:
            raise ConnectionResetError("the other end has closed the connection")
        found += data
    return found
