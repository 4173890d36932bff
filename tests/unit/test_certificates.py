"""Certificates of a run and of an organization: which are accepted, and what is said of the others."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from pathlib import Path

import pytest

from tests.authority import Authority
from unisono.errors import SettingsError, WorldError
from unisono.handshake.certificates import (
    Credentials,
    describe,
    is_name_of,
    organization_credentials,
    require_name,
    run_credentials,
    server_context,
)
from unisono.handshake.encrypted_pipe import encrypt, handshake
from unisono.handshake.mutual_proof import RunSecret

SECRET = RunSecret(b"a secret of the run")


def meet(listens: Credentials, connects: Credentials) -> tuple[OSError | ssl.SSLSocket, OSError | ssl.SSLSocket]:
    """Let two processes begin TLS. Return the connection or the error of the end that listens, and of the other."""
    ends = socket.socketpair()
    found: list[OSError | ssl.SSLSocket] = [OSError(), OSError()]

    def be(number: int, credentials: Credentials) -> None:
        try:
            found[number] = handshake(ends[number], credentials, listens=number == 0, seconds=10.0)
        except OSError as error:
            found[number] = error

    other = threading.Thread(target=be, args=(0, listens))
    other.start()
    be(1, connects)
    other.join()
    return found[0], found[1]


def said(listens: Credentials, connects: Credentials) -> list[str | None]:
    """Return what both ends say of a handshake that fails."""
    found = meet(listens, connects)
    assert all(isinstance(each, OSError) and not isinstance(each, ssl.SSLSocket) for each in found)
    return [describe(each, "rank 1 on host b") for each in found if isinstance(each, OSError)]


def test_members_with_one_secret_accept_each_other() -> None:
    for end in meet(run_credentials(SECRET), run_credentials(SECRET)):
        assert isinstance(end, ssl.SSLSocket)
        with end:
            assert end.version() == "TLSv1.3"


def test_a_member_with_another_secret_is_refused_by_both_ends() -> None:
    own, other = run_credentials(SECRET), run_credentials(RunSecret(b"another secret of another run"))
    for texts in (said(own, other), said(other, own)):
        assert any("does not accept the certificate of rank 1 on host b" in (text or "") for text in texts)


def test_the_secret_of_another_use_is_another_key() -> None:
    assert len({SECRET.derive(b"certificate authority"), SECRET.derive(b"store"), b"a secret of the run"}) == 3


@pytest.mark.ci
@pytest.mark.parametrize("foreign_end", [0, 1])
@pytest.mark.parametrize("kind", ["expired", "other authority", "revoked", "run"])
def test_wrong_certificates_are_refused(tmp_path: Path, kind: str, foreign_end: int) -> None:
    """The end that checks says why. The other one says that its own certificate is not accepted."""
    authority = Authority(tmp_path)
    good = authority.issue(["a"])
    if kind == "expired":  # since the process has started
        wrong = organization_credentials(authority.issue(["b"], seconds=4))
        time.sleep(4.1)
    elif kind == "other authority":
        wrong = organization_credentials(Authority(tmp_path, "Other").issue(["b"], ca=authority.ca))
    elif kind == "revoked":
        wrong = organization_credentials(authority.issue(["b"], revoked=True))
        authority.write_ca(revocation_list=True)
    else:
        wrong = run_credentials(SECRET)
        wrong.client.load_verify_locations(authority.ca)
        wrong.server.load_verify_locations(authority.ca)
    right = organization_credentials(good)
    ends = [wrong, right] if foreign_end == 0 else [right, wrong]
    texts = said(ends[0], ends[1])
    reasons = {"expired": "certificate has expired", "revoked": "certificate revoked"}
    checks = texts[1 - foreign_end] or ""
    assert checks.startswith("This process does not accept the certificate of rank 1 on host b: ")
    assert reasons.get(kind, "") in checks
    assert "The certificate of this process is not accepted by rank 1 on host b" in (texts[foreign_end] or "")


def test_a_process_does_not_start_with_an_expired_certificate(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"The certificate of CN=b expired on \d{4}-"):
        organization_credentials(Authority(tmp_path).issue(["b"], seconds=-3600))


def test_a_certificate_that_expires_does_not_end_a_connection(tmp_path: Path) -> None:
    """TLS checks dates when a connection begins."""
    authority = Authority(tmp_path)
    near, far = meet(
        organization_credentials(authority.issue(["a"], seconds=4)), organization_credentials(authority.issue(["b"]))
    )
    assert isinstance(near, ssl.SSLSocket)
    assert isinstance(far, ssl.SSLSocket)
    time.sleep(4.1)
    with near, far:
        near.sendall(b"word")
        assert far.recv(4) == b"word"
    with pytest.raises(SettingsError, match="expired on"):
        organization_credentials(authority.issue(["a"], seconds=-1))


def test_wrong_files_are_one_message_each(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files, other = authority.issue(["a"]), authority.issue(["b"])
    text = tmp_path / "text"
    text.write_text("no PEM\n")
    missing = tmp_path / "missing"
    for wrong, error, fact in (
        (files._replace(ca=missing), f"Cannot read the file of secure.ca: {missing}.", "No such file"),
        (files._replace(ca=text), f"Cannot use the file of secure.ca: {text}.", "no certificate in PEM format"),
        (files._replace(cert=text), f"Cannot use the file of secure.cert: {text}.", "no certificate in PEM format"),
        (files._replace(key=text), f"Cannot use the file of secure.key: {text}.", "no private key in PEM format"),
        (files._replace(key=other.key), f"Cannot use the file of secure.key: {other.key}.", "not that of the cert"),
    ):
        with pytest.raises(SettingsError) as caught:
            organization_credentials(wrong)
        assert caught.value.problems[0].error == error
        assert fact in caught.value.problems[0].facts


def test_the_page_needs_a_certificate_and_its_key(tmp_path: Path) -> None:
    files = Authority(tmp_path).issue(["a"])
    assert server_context(str(files.cert), str(files.key)).verify_mode is ssl.CERT_NONE
    with pytest.raises(SettingsError, match="--cert needs --key"):
        server_context(str(files.cert), "")
    with pytest.raises(SettingsError, match="expired on"):
        server_context(str(Authority(tmp_path).issue(["old"], seconds=-60).cert), str(files.key))


@pytest.mark.parametrize(
    ("pattern", "host", "covers"),
    [
        ("a.example.org", "A.example.org.", True),
        ("*.example.org", "a.example.org", True),
        ("*.example.org", "a.b.example.org", False),
        ("*.example.org", "example.org", False),
        ("*", "a", False),
        ("a", "b", False),
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.10", False),
        ("fd00::1", "fd00:0::1", True),
    ],
)
def test_names_in_certificates(pattern: str, host: str, *, covers: bool) -> None:
    assert is_name_of(pattern, host) is covers


def test_a_certificate_names_its_host(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = organization_credentials(authority.issue(["a"]), ["b", "10.0.0.*"])
    near, far = meet(own, organization_credentials(authority.issue(["b", "10.0.0.2"])))
    assert isinstance(near, ssl.SSLSocket)
    assert isinstance(far, ssl.SSLSocket)
    far.close()
    require_name(own, near, ["b", "10.0.0.9"], "rank 1 on host b")
    require_name(own, near, ["other", "10.0.0.2"], "rank 1 on host b")
    with pytest.raises(WorldError, match="names another host") as caught:
        require_name(own, near, ["c", "10.0.0.3"], "rank 1 on host c")
    assert "its certificate is that of b, 10.0.0.2" in str(caught.value)
    with pytest.raises(WorldError, match="may not join"):
        require_name(own._replace(allowed=("c",)), near, ["b", "10.0.0.2"], "rank 1 on host b")
    near.close()


def test_a_pipe_passes_everything_on_before_it_closes() -> None:
    near, far = socket.socketpair()
    pipes = []
    other = threading.Thread(target=lambda: pipes.append(encrypt(far, run_credentials(SECRET), listens=True)))
    other.start()
    here = encrypt(near, run_credentials(SECRET), listens=False)
    other.join()
    there = pipes[0]
    content = bytes(range(256)) * 40_000

    def send() -> None:
        with here:
            here.sendall(content)

    sender = threading.Thread(target=send)
    sender.start()
    found = b""
    while data := there.recv(1 << 20):
        found += data
    assert found == content
    sender.join()
    there.close()
