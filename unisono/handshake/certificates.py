"""Certificates for TLS 1.3 between processes of a run: those of an organization, or of the run itself.

A run needs no files. All members have its secret, and the key of its authority is derived from it (HKDF-SHA256, RFC
5869). So each process signs a certificate for itself, which the others accept:

    secret --HKDF--> Ed25519 key of the authority --signs--> certificate of this process, new for each group
                                                             with a key of its own, valid for a day

Certificates of an organization are files (`secure.ca`, `secure.cert`, `secure.key`), and name hosts. TLS checks dates,
signatures, and the revocation lists that the file of the authority contains. `require_name` checks names.

The package cryptography makes and reads certificates; Python's ssl module uses them. No torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import ssl
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from unisono.errors import CertificateError, SettingsError
from unisono.handshake.mutual_proof import RunSecret

if TYPE_CHECKING:
    from cryptography import x509

INSTALL = "pip install 'unisono[secure]'"

VALID_BEFORE, VALID_AFTER = timedelta(days=1), timedelta(days=1)
"""How long before and after this moment a run's own certificates are valid: the clocks of hosts differ."""

AUTHORITY = "Unisono run"
MEMBER = "Unisono member"

LIST = b"-----BEGIN X509 CRL-----"
"""Begins a revocation list in a file."""


class OrganizationFiles(NamedTuple):
    """Files in PEM format.

    Attributes:
        ca: the certificates of the authorities, and their revocation lists, if any.
        cert: the certificate of this host, and those between it and an authority.
        key: its private key, without a password.
    """

    ca: Path
    cert: Path
    key: Path


class Credentials(NamedTuple):
    """What this process shows, and what it demands of others.

    Attributes:
        server: for connections that this process accepts.
        client: for connections that this process opens.
        names_hosts: whether certificates name hosts.
        allowed: patterns of names of hosts that may join; empty: all.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext
    names_hosts: bool = False
    allowed: tuple[str, ...] = ()


# -- the run's own authority


def run_credentials(secret: RunSecret, allowed: Sequence[str] = ()) -> Credentials:
    """Return a new certificate that the authority of the run has signed, and trust in that authority.

    Raises:
        SettingsError: the package cryptography is missing.
    """
    x509, ed25519, serialization = _cryptography()
    authority = ed25519.Ed25519PrivateKey.from_private_bytes(secret.derive(b"certificate authority"))
    own = ed25519.Ed25519PrivateKey.generate()
    ca = _certificate(x509, AUTHORITY, authority.public_key(), authority, is_authority=True)
    leaf = _certificate(x509, MEMBER, own.public_key(), authority, is_authority=False)
    pem = serialization.Encoding.PEM
    form, no_password = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ca_text = ca.public_bytes(pem).decode()
    with _private_file(leaf.public_bytes(pem) + own.private_bytes(pem, form, no_password)) as path:
        server, client = (_context(purpose, path, path, ca_text=ca_text) for purpose in _PURPOSES)
    return Credentials(server, client, allowed=tuple(allowed))


def _cryptography() -> tuple[Any, Any, Any]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        fact = "It needs the package cryptography."
        raise SettingsError("Cannot encrypt messages between hosts.", fact, INSTALL) from None
    return x509, ed25519, serialization


def _certificate(x509: Any, subject: str, public: Any, authority: Any, *, is_authority: bool) -> x509.Certificate:
    """Return a certificate. That of the authority has the same name and key in all processes, and is never sent."""
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.now(UTC)
    name = lambda text: x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])  # noqa: E731
    builder = (
        x509.CertificateBuilder()
        .subject_name(name(subject))
        .issuer_name(name(AUTHORITY))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - VALID_BEFORE)
        .not_valid_after(now + VALID_AFTER)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
    )
    if not is_authority:
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    return builder.sign(authority, None)


@contextmanager
def _private_file(content: bytes) -> Iterator[str]:
    """Yield the path of a file with this content, in memory where the system can: ssl reads keys from files only."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("unisono", os.MFD_CLOEXEC)
        path, remove = f"/proc/self/fd/{descriptor}", lambda: None
    else:
        descriptor, path = tempfile.mkstemp()
        remove = Path(path).unlink
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield path
    finally:
        os.close(descriptor)
        remove()


# -- contexts

_PURPOSES = (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)


def _context(
    purpose: int, cert: str | Path, key: str | Path, *, ca_text: str | None = None, ca: Path | None = None
) -> ssl.SSLContext:
    """Return a context for TLS 1.3 alone, which demands a certificate of the other end."""
    context = ssl.SSLContext(purpose)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # require_name checks it, at both ends
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(cert, key, password=lambda: "")
    context.load_verify_locations(cafile=ca, cadata=ca_text)
    if ca is not None and LIST in ca.read_bytes():
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    return context


def organization_credentials(files: OrganizationFiles, allowed: Sequence[str] = ()) -> Credentials:
    """Return the certificate in files, and trust in the authorities in a file.

    Raises:
        SettingsError: a file is missing or has other content, or the certificate is not valid now.
    """
    for setting, path in zip(("secure.ca", "secure.cert", "secure.key"), files, strict=True):
        try:
            path.read_bytes()
        except OSError as error:
            do = f"name a file in PEM format: --set {setting}=FILE"
            raise SettingsError(f"Cannot read the file of {setting}: {path}.", f"{error.strerror}.", do) from None
    _require_valid(files.cert)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(files.ca)
    except ssl.SSLError:
        fact = "It has no certificate in PEM format."
        raise SettingsError(f"Cannot use the file of secure.ca: {files.ca}.", fact, "--set secure.ca=FILE") from None
    try:
        server, client = (_context(purpose, files.cert, files.key, ca=files.ca) for purpose in _PURPOSES)
    except (ssl.SSLError, ValueError) as error:
        raise _bad_key(files, error) from None
    return Credentials(server, client, names_hosts=True, allowed=tuple(allowed))


def server_context(cert: str, key: str) -> ssl.SSLContext:
    """Return a context for a page at https://, which asks for no certificate of the other end.

    Raises:
        SettingsError: a file is not given, cannot be read, or has other content.
    """
    if not cert or not key:
        missing, given = ("--cert", "--key") if key else ("--key", "--cert")
        raise SettingsError(f"{given} needs {missing}.", "TLS needs a certificate and its key.", f"{missing} FILE")
    for path in (cert, key):
        if not Path(path).is_file():
            raise SettingsError(f"Cannot read the file {path}.", "It does not exist.", "--cert FILE --key FILE")
    _require_valid(Path(cert), "--cert")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # some browsers of organizations have no newer one
    try:
        context.load_cert_chain(cert, key, password=lambda: "")
    except (ssl.SSLError, ValueError, OSError) as error:
        raise _bad_key(OrganizationFiles(Path(), Path(cert), Path(key)), error, "--key") from None
    return context


def _bad_key(files: OrganizationFiles, error: Exception, setting: str = "secure.key") -> SettingsError:
    reason = getattr(error, "reason", None) or str(error)
    if reason == "KEY_VALUES_MISMATCH":
        fact = f"The key is not that of the certificate {files.cert}."
    else:
        fact = f"It has no private key in PEM format without a password ({reason.replace('_', ' ').lower()})."
    return SettingsError(f"Cannot use the file of {setting}: {files.key}.", fact, _typed(setting))


def _typed(setting: str) -> str:
    return f"{setting} FILE" if setting.startswith("--") else f"--set {setting}=FILE"


def _require_valid(path: Path, setting: str = "secure.cert") -> None:
    """Raise SettingsError if the certificate in a file is not valid now."""
    x509, _, _ = _cryptography()
    error, do = f"Cannot use the file of {setting}: {path}.", f"{_typed(setting)}, with a valid certificate"
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError:
        raise SettingsError(error, "It has no certificate in PEM format.", do) from None
    now, last, first = datetime.now(UTC), certificate.not_valid_after_utc, certificate.not_valid_before_utc
    subject = certificate.subject.rfc4514_string()
    if now > last:
        raise SettingsError(error, f"The certificate of {subject} expired on {last:%Y-%m-%d %H:%M} UTC.", do)
    if now < first:
        raise SettingsError(error, f"The certificate of {subject} is valid from {first:%Y-%m-%d %H:%M} UTC.", do)


# -- names


def names_in(certificate: dict[str, Any]) -> list[str]:
    """Return the host names and addresses of a certificate, as SSLSocket.getpeercert has returned it."""
    return [str(name) for kind, name in certificate.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]


def is_name_of(pattern: str, host: str) -> bool:
    """Return whether a name in a certificate covers a host: the same name or address, or *.DOMAIN for one label."""
    with contextlib.suppress(ValueError):
        return ip_address(pattern) == ip_address(host)
    pattern, host = pattern.lower().rstrip("."), host.lower().rstrip(".")
    if pattern.startswith("*."):
        return host.partition(".")[2] == pattern[2:] and bool(re.fullmatch(r"[a-z0-9_-]+", host.partition(".")[0]))
    return pattern == host


def require_name(credentials: Credentials, connection: ssl.SSLSocket, hosts: Sequence[str], what: str) -> None:
    """Require that the certificate of the other end names its host, and that this host may join.

    Args:
        credentials: those of this process.
        connection: the connection, after the handshake.
        hosts: the name that the host states, and its address.
        what: the other end, for the message.

    Raises:
        CertificateError: the certificate names other hosts, or the host is not allowed.
    """
    names = list(hosts[:1])
    if credentials.names_hosts:
        names = names_in(connection.getpeercert() or {})
        if not any(is_name_of(name, host) for name in names for host in hosts):
            fact = f"It is on host {hosts[0]}, and its certificate is that of {', '.join(names) or 'no host'}."
            do = "use a certificate for that host there: --set secure.cert=FILE"
            raise CertificateError(f"The certificate of {what} names another host.", fact, do)
    if credentials.allowed and not any(fnmatchcase(name, each) for name in names for each in credentials.allowed):
        fact = f"Its host is {' or '.join(names)}, and secure.hosts is {', '.join(credentials.allowed)}."
        raise CertificateError(f"The host of {what} may not join.", fact, "--set 'secure.hosts=[...]', with this host")


# -- errors


def describe(error: OSError, what: str) -> str | None:
    """Return what a failed handshake says about a certificate; None if it says nothing about one.

    Args:
        error: raised by the handshake, or by the first read after it.
        what: the other end, for the message.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"This process does not accept the certificate of {what}: {error.verify_message}."
    reason = (getattr(error, "reason", None) or "").lower().replace("_", " ")
    if isinstance(error, ssl.SSLError) and "alert" in reason:
        alert = reason.partition("alert ")[2] or reason
        return f"The certificate of this process is not accepted by {what}: {alert}."
    return None
