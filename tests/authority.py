"""A certificate authority for tests: certificates that are valid, expired, revoked, or of another authority."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from unisono.handshake.certificates import OrganizationFiles

PEM = serialization.Encoding.PEM


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


class Authority:
    """An authority with a key of its own.

    Args:
        folder: The folder for files.
        name: Its name.
    """

    def __init__(self, folder: Path, name: str = "Test authority") -> None:
        self.folder, self.name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._revoked: list[int] = []
        self._own = self._certificate(name, self._key.public_key(), [], 365, is_authority=True)
        self.ca = folder / f"{name}.pem"
        self.write_ca()

    def write_ca(self, *, revocation_list: bool = False) -> None:
        """Write the file of the authority, with its revocation list if there is to be one."""
        content = self._own.public_bytes(PEM)
        if revocation_list:
            now = datetime.now(UTC)
            builder = x509.CertificateRevocationListBuilder().issuer_name(_name(self.name))
            builder = builder.last_update(now - timedelta(days=1)).next_update(now + timedelta(days=30))
            for serial in self._revoked:
                entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
                builder = builder.add_revoked_certificate(entry)
            content += builder.sign(self._key, hashes.SHA256()).public_bytes(PEM)
        self.ca.write_bytes(content)

    def issue(
        self,
        names: Sequence[str],
        *,
        seconds: float = 86400.0,
        revoked: bool = False,
        label: str = "",
        ca: Path | None = None,
    ) -> OrganizationFiles:
        """Write a certificate for these host names and addresses, and its key.

        Args:
            names: Host names and addresses.
            seconds: How long it is still valid; negative: it expired that long ago.
            revoked: Whether it is in the revocation list, once that is written.
            label: Begins the names of the files.
            ca: The file of the authority that its owner trusts; this one by default.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._certificate(names[0], key.public_key(), names, seconds / 86400, is_authority=False)
        if revoked:
            self._revoked.append(certificate.serial_number)
        label = label or names[0]
        files = OrganizationFiles(ca or self.ca, self.folder / f"{label}.cert", self.folder / f"{label}.key")
        files.cert.write_bytes(certificate.public_bytes(PEM))
        no_password = serialization.NoEncryption()
        files.key.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, no_password))
        files.key.chmod(0o600)
        return files

    def _certificate(
        self, subject: str, key: ec.EllipticCurvePublicKey, names: Sequence[str], days: float, *, is_authority: bool
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        constraints = x509.BasicConstraints(ca=is_authority, path_length=None)
        builder = x509.CertificateBuilder().subject_name(_name(subject)).issuer_name(_name(self.name)).public_key(key)
        builder = builder.serial_number(x509.random_serial_number()).add_extension(constraints, critical=True)
        builder = builder.not_valid_before(now - timedelta(days=400)).not_valid_after(now + timedelta(days=days))
        if names:
            every = [
                x509.IPAddress(ipaddress.ip_address(name)) if _is_address(name) else x509.DNSName(name)
                for name in names
            ]
            builder = builder.add_extension(x509.SubjectAlternativeName(every), critical=False)
        return builder.sign(self._key, hashes.SHA256())
