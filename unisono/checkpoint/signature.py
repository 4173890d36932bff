"""Sign the files of a checkpoint or of an export, and check signatures. No torch.

A signature is a file beside those that it signs, in published formats, so that other programs can check it:

    {"payload": ..., "payloadType": "application/vnd.in-toto+json", "signatures": [{"keyid": ..., "sig": ...}]}
        an envelope of DSSE 1.0 (https://github.com/secure-systems-lab/dsse); payload and sig are in base64
    {"_type": "https://in-toto.io/Statement/v1", "subject": [{"name": "state.json", "digest": {"sha256": ...}}], ...}
        the payload: a statement of in-toto (https://github.com/in-toto/attestation), with the sha256 of each file

The signature is that of Ed25519 (RFC 8032). It covers the type of the payload too, so nothing that was signed for
another purpose passes. Keys are files in PEM (`openssl genpkey -algorithm ed25519`) or in OpenSSH's format (`ssh-keygen
-t ed25519`). The package cryptography reads them and computes; it is imported when a key is read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from unisono.checkpoint import manifest
from unisono.checkpoint.manifest import MANIFEST, MOST_MANIFEST, SIGNATURE, WrittenFile
from unisono.checkpoint.regular_file import open_regular, read_regular
from unisono.errors import CheckpointError, Problem, SettingsError
from unisono.json_forms import is_text, parse_value

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:unisono:files:1"
"""The type of our statements. The predicate itself is empty: the files say what they are."""

EXPORT_SUFFIX = ".signature.json"
"""The signature of an exported file is in a file of its name and this suffix."""

Sign = Callable[[Mapping[str, WrittenFile]], Mapping[str, bytes]]
"""Returns the files that are stored beside these files, by name: their signature, or none."""

INSTALL = "pip install 'unisono[secure]'"


class TrustedKey(NamedTuple):
    """A public key, and the file that it was read from."""

    path: Path
    key: Ed25519PublicKey


def unsigned(files: Mapping[str, WrittenFile]) -> Mapping[str, bytes]:
    """Return no signature."""
    return {}


def signing(path: Path) -> Sign:
    """Return a function that signs with the private key in a file. It reads the key at each call, and keeps none.

    The process that publishes checkpoints may change during a run. So each reads the key when it needs it.
    """

    def sign(files: Mapping[str, WrittenFile]) -> Mapping[str, bytes]:
        return {SIGNATURE: envelope({name: file.sha256 for name, file in files.items()}, private_key(path))}

    return sign


def key_problems(sign: Path | None, trust: Sequence[Path]) -> list[Problem]:
    """Return what is wrong with the files that secure.sign and secure.trust name."""
    problems: list[Problem] = []
    try:
        if sign is not None:
            private_key(sign)
        trusted_keys(trust)
    except SettingsError as error:
        problems += error.problems
    return problems


def private_key(path: Path) -> Ed25519PrivateKey:
    """Read an unencrypted private key. Raises SettingsError if the file holds none."""
    content, serialization = _key_file(path, "secure.sign")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    read = (
        serialization.load_ssh_private_key if b"OPENSSH PRIVATE KEY" in content else serialization.load_pem_private_key
    )
    try:
        key = read(content, password=None)
    except Exception as error:  # ValueError, TypeError, UnsupportedAlgorithm
        raise _no_key(path, "secure.sign", "no private key without a password", error) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise _no_key(path, "secure.sign", f"no Ed25519 key, but a {type(key).__name__.removeprefix('_')}")
    return key


def trusted_keys(paths: Sequence[Path]) -> list[TrustedKey]:
    """Read public keys. Raises SettingsError if a file holds none."""
    return [TrustedKey(path, _public_key(path)) for path in paths]


def _public_key(path: Path) -> Ed25519PublicKey:
    content, serialization = _key_file(path, "secure.trust")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        read = serialization.load_ssh_public_key if content.startswith(b"ssh-") else serialization.load_pem_public_key
        key = read(content)
    except Exception as error:  # ValueError, UnsupportedAlgorithm
        raise _no_key(path, "secure.trust", "no public key", error) from None
    if not isinstance(key, Ed25519PublicKey):
        raise _no_key(path, "secure.trust", f"no Ed25519 key, but a {type(key).__name__.removeprefix('_')}")
    return key


def _key_file(path: Path, setting: str) -> tuple[bytes, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
    except Exception as error:
        fact = f"{type(error).__name__}: {error}. The package cryptography computes them."
        raise SettingsError("Cannot sign files, or check signatures.", fact, INSTALL) from None
    try:
        with path.open("rb") as file:
            return file.read(1 << 16), serialization
    except OSError as error:
        raise _no_key(path, setting, "no file that can be read", error) from None


def _no_key(path: Path, setting: str, what: str, error: Exception | None = None) -> SettingsError:
    facts = f"It is {what}{'' if error is None else f' ({type(error).__name__}: {error})'}."
    make = f"openssl genpkey -algorithm ed25519 -out {path}"
    if setting == "secure.trust":
        make = f"openssl pkey -in PRIVATE.pem -pubout -out {path}"
    return SettingsError(f"Cannot read the key {path} ({setting}).", facts, make)


def key_id(key: Ed25519PublicKey) -> str:
    """Return the fingerprint of a public key, as `ssh-keygen -l` prints it."""
    raw = key.public_bytes_raw()
    blob = b"".join(len(part).to_bytes(4, "big") + part for part in (b"ssh-ed25519", raw))
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def envelope(digests: Mapping[str, str], key: Ed25519PrivateKey) -> bytes:
    """Return the signature of files.

    Args:
        digests: sha256 of each file in hexadecimal digits, by name.
        key: The private key.
    """
    subject = [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(digests.items())]
    statement = {"_type": STATEMENT, "subject": subject, "predicateType": PREDICATE, "predicate": {}}
    payload = json.dumps(statement, sort_keys=True).encode()
    signature = {"keyid": key_id(key.public_key()), "sig": base64.b64encode(key.sign(_signed_bytes(payload))).decode()}
    content = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [signature],
    }
    return json.dumps(content, indent=1).encode() + b"\n"


def _signed_bytes(payload: bytes) -> bytes:
    """Return what is signed: DSSE's "pre-authentication encoding" of the payload and its type."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def signed_digests(content: bytes, keys: Sequence[TrustedKey]) -> tuple[dict[str, str], TrustedKey]:
    """Return the sha256 of each signed file by name, and the key that signed them.

    Args:
        content: An envelope.
        keys: The keys of which one must have signed.

    Raises:
        ValueError: The envelope has another form, or none of the keys has signed it.
    """
    from cryptography.exceptions import InvalidSignature

    found = parse_value(content)
    if not isinstance(found, dict) or found.get("payloadType") != PAYLOAD_TYPE or not is_text(found.get("payload")):
        raise ValueError("it is no envelope of DSSE around a statement of in-toto")
    signatures = found.get("signatures")
    try:
        payload = base64.b64decode(found["payload"], validate=True)
        raw = [base64.b64decode(each["sig"], validate=True) for each in signatures or ()]
    except (binascii.Error, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"it is no envelope of DSSE ({error})") from None
    for trusted in keys:
        for signature in raw:
            try:
                trusted.key.verify(signature, _signed_bytes(payload))
            except InvalidSignature:
                continue
            return _digests_in(parse_value(payload)), trusted
    raise ValueError(f"none of the trusted keys has signed it ({', '.join(key_id(each.key) for each in keys)})")


def _digests_in(statement: Any) -> dict[str, str]:
    if not isinstance(statement, dict) or statement.get("_type") != STATEMENT:
        raise ValueError("it signs no statement of in-toto")
    if statement.get("predicateType") != PREDICATE:
        raise ValueError(f"it signs a statement of another type, {statement.get('predicateType')!a:.80}")
    try:
        found = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
    except (KeyError, TypeError):
        raise ValueError("it names no files") from None
    if len(found) != len(statement["subject"]):
        raise ValueError("it names a file twice")
    return found


def check_checkpoint(folder: Path, keys: Sequence[TrustedKey]) -> TrustedKey:
    """Check the signature of a checkpoint that is otherwise intact, and return the key that signed it.

    Raises:
        CheckpointError: It is not signed by one of the keys, or a file is another one than was signed.
    """
    try:
        actual = {name: entry["sha256"] for name, entry in manifest.files_of(folder).items() if name != SIGNATURE}
    except (OSError, ValueError) as error:
        raise _refused(folder, f"{folder / MANIFEST} cannot be read ({error})") from None
    return _check(folder / SIGNATURE, actual, folder, keys)


def check_export(path: Path, keys: Sequence[TrustedKey]) -> TrustedKey:
    """Check the signature of an exported file, and return the key that signed it.

    Raises:
        CheckpointError: It is not signed by one of the keys, or has been changed.
    """
    return _check(path.with_name(path.name + EXPORT_SUFFIX), {path.name: sha256_of(path)}, path, keys)


def sign_export(path: Path, key: Ed25519PrivateKey) -> Path:
    """Write the signature of an exported file beside it, and return its path."""
    signature = path.with_name(path.name + EXPORT_SUFFIX)
    signature.write_bytes(envelope({path.name: sha256_of(path)}, key))
    return signature


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file. Raises CheckpointError if it cannot be read."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"Cannot read {path}.", f"{type(error).__name__}: {error}", "name another file."
        ) from None


def _check(signature: Path, actual: Mapping[str, str], what: Path, keys: Sequence[TrustedKey]) -> TrustedKey:
    """Compare the digests of files with the signed ones."""
    try:
        signed, key = signed_digests(read_regular(signature, MOST_MANIFEST), keys)
    except FileNotFoundError:
        raise _refused(what, f"It is not signed: there is no {signature}") from None
    except (OSError, ValueError) as error:
        raise _refused(what, f"{signature} is not valid: {error}") from None
    for name in sorted(actual.keys() | signed.keys(), key=str):
        if actual.get(name) != signed.get(name):
            path = what if what.name == name else what / ascii(name)[1:-1]
            state = "has been changed since" if name in actual and name in signed else "is not what"
            raise _refused(what, f"{path} {state} {key.path} signed the files")
    return key


def _refused(what: Path, facts: str) -> CheckpointError:
    return CheckpointError(
        f"Cannot trust {what}.",
        f"{facts}.",
        "name one that is signed; to load it without a signature, begin again with --set secure.trust=[].",
    )
