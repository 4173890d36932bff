"""Signatures of checkpoints and exports: a file that was changed, even with a new manifest, is refused by its name."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.crafted import Draft
from unisono.checkpoint.contents import FORMAT
from unisono.checkpoint.load import load, newest, only_signed
from unisono.checkpoint.manifest import SIGNATURE, damage_of, name_of
from unisono.checkpoint.safetensors_writer import chunks_in_place, file_layout
from unisono.checkpoint.save import SaveJob, packed
from unisono.checkpoint.signature import PAYLOAD_TYPE, key_problems, signing, trusted_keys
from unisono.checkpoint.storage import FolderStorage, storage_at
from unisono.cli.main import main
from unisono.errors import CheckpointError
from unisono.tensors.codec import TensorTable

PEM = serialization.Encoding.PEM


def keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a pair of keys in PEM, and return their paths: (private, public)."""
    key = Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(
        key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
    public.write_bytes(key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def save(run_dir: Path, private: Path | None, step: int = 5) -> Path:
    """Write a checkpoint, signed if there is a key, and return its path."""
    tensors = TensorTable()
    states = {"model": {"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(2)}}
    about = {"models": ["model"], "identity": {"run": "a" * 32}, "changes": []}
    made = packed(states, about, tensors)
    assert not isinstance(made, CheckpointError)
    plain = {"format": FORMAT, "steps": step, **made[1]}
    storage = FolderStorage(run_dir / "checkpoints", *([signing(private)] if private is not None else []))
    job = SaveJob(storage, step, tensors, plain, (9, 0), rank=0, ranks=[0], attempt="one")
    job.run(chunks_in_place(file_layout(tensors), tensors))
    assert job.problem is None
    return run_dir / "checkpoints" / name_of(step)


def change_a_weight(folder: Path) -> None:
    """Change a weight, and write all files again under a manifest that fits, with the old signature beside them."""
    draft = Draft(folder)
    name = "rank-00000.safetensors"
    draft.data[name] = b"\x01" + draft.data[name][1:]
    draft.seal()


def refused(run_dir: Path, public: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        newest(run_dir, pytest.fail, only_signed(trusted_keys([public])))
    return str(error.value)


def test_a_signed_checkpoint_is_loaded_and_a_changed_weight_is_refused_by_name(tmp_path: Path) -> None:
    private, public = keys(tmp_path, "mine")
    path = save(tmp_path / "run", private)
    assert newest(tmp_path / "run", pytest.fail, only_signed(trusted_keys([public]))) == path
    change_a_weight(path)
    assert damage_of(path) is None, "without the signature, nothing shows the change"
    assert newest(tmp_path / "run", pytest.fail) == path
    message = refused(tmp_path / "run", public)
    assert message.startswith(f"Cannot trust {path}.\n  {path}/rank-00000.json has been changed since {public} signed")


def test_a_load_without_a_valid_signature_is_refused(tmp_path: Path) -> None:
    private, public = keys(tmp_path, "mine")
    _, stranger = keys(tmp_path, "stranger")
    save(tmp_path / "unsigned", None)
    assert "It is not signed: there is no" in refused(tmp_path / "unsigned", public)
    path = save(tmp_path / "signed", private)
    assert "none of the trusted keys has signed it (SHA256:" in refused(tmp_path / "signed", stranger)
    content = json.loads((path / SIGNATURE).read_bytes())
    crafted: dict[str, Any] = {
        "no JSON": b"x",
        "a list": [],
        "another type": {**content, "payloadType": "text/plain"},
        "another payload": {**content, "payload": base64.b64encode(b"{}").decode()},
        "no base64": {**content, "payload": "?"},
        "no signatures": {**content, "signatures": []},
        "a number": {**content, "signatures": 3},
        "an empty signature": {**content, "signatures": [{"keyid": "", "sig": ""}]},
        "no signature": {**content, "signatures": [{}]},
    }
    for name, crafted_content in crafted.items():
        (path / SIGNATURE).write_bytes(
            crafted_content if isinstance(crafted_content, bytes) else json.dumps(crafted_content).encode()
        )
        Draft(path).seal()
        assert refused(tmp_path / "signed", public).startswith("Cannot trust"), name


def test_the_signature_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    private, public = keys(tmp_path, "mine")
    one, other = save(tmp_path / "one", private, 5), save(tmp_path / "other", private, 6)
    shutil.copy(other / SIGNATURE, one / SIGNATURE)
    Draft(one).seal()
    assert f"{one}/" in refused(tmp_path / "one", public)


def test_openssl_accepts_the_signature(tmp_path: Path) -> None:
    """The bytes that DSSE says are signed, by another implementation of Ed25519."""
    private, public = keys(tmp_path, "mine")
    path = save(tmp_path / "run", private)
    content = json.loads((path / SIGNATURE).read_bytes())
    payload = base64.b64decode(content["payload"])
    (tmp_path / "signed").write_bytes(
        f"DSSEv1 {len(PAYLOAD_TYPE)} {PAYLOAD_TYPE} {len(payload)} ".encode() + payload,
    )
    (tmp_path / "sig").write_bytes(base64.b64decode(content["signatures"][0]["sig"]))
    words = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", str(public), "-rawin"]
    words += ["-in", str(tmp_path / "signed"), "-sigfile", str(tmp_path / "sig")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    statement = json.loads(payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert [each["name"] for each in statement["subject"]] == [
        "rank-00000.json",
        "rank-00000.safetensors",
        "state.json",
    ]


def test_keys_of_openssh_are_read_and_others_are_refused(tmp_path: Path) -> None:
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "team", "-f", str(tmp_path / "id")]
    subprocess.run(words, timeout=200, check=True)
    save(tmp_path / "run", tmp_path / "id")
    assert newest(tmp_path / "run", pytest.fail, only_signed(trusted_keys([tmp_path / "id.pub"])))
    locked = ["ssh-keygen", "-q", "-t", "ed25519", "-a", "1", "-N", "secret", "-f", str(tmp_path / "locked")]
    subprocess.run(locked, timeout=200, check=True)
    (problem,) = key_problems(tmp_path / "locked", [])
    assert "no private key without a password" in problem.facts
    other = generate_private_key(SECP256R1())
    (tmp_path / "ec.pem").write_bytes(
        other.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    assert "no Ed25519 key" in key_problems(tmp_path / "ec.pem", [])[0].facts
    assert "no file that can be read" in key_problems(tmp_path / "nowhere", [])[0].facts
    assert "no public key" in key_problems(None, [tmp_path / "ec.pem"])[0].facts


def test_a_checkpoint_at_a_url_is_signed(tmp_path: Path) -> None:
    private, public = keys(tmp_path, "mine")
    tensors = TensorTable()
    made = packed({"model": {"weight": torch.ones(3)}}, {"models": ["model"], "identity": {}, "changes": []}, tensors)
    assert not isinstance(made, CheckpointError)
    storage = storage_at("memory://signed/run", signing(private))
    job = SaveJob(
        storage, 7, tensors, {"format": FORMAT, "steps": 7, **made[1]}, (9, 0), rank=0, ranks=[0], attempt="x"
    )
    job.run(chunks_in_place(file_layout(tensors), tensors))
    assert job.problem is None
    path = storage.fetch(7, tmp_path)
    assert damage_of(path) is None
    only_signed(trusted_keys([public]))(path)
    assert load(path).steps == 7


def test_verify_and_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    private, public = keys(tmp_path, "mine")
    path = save(tmp_path / "run", private)
    assert main(["verify", str(tmp_path / "run"), "--key", str(public)]) == 0
    assert f"{path}: all files are those that {public} signed (SHA256:" in capsys.readouterr().out
    out = tmp_path / "model.safetensors"
    words = ["export", str(tmp_path / "run"), str(out), "--sign", str(private), "--trust", str(public)]
    assert main(words) == 0
    assert main(["verify", str(out), "--key", str(public), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["path"] == str(out)
    out.write_bytes(out.read_bytes()[:-1] + b"\x01")
    assert main(["verify", str(out), "--key", str(public)]) == 1
    assert f"{out} has been changed since {public} signed" in capsys.readouterr().err
    change_a_weight(path)
    assert main(["verify", str(tmp_path / "run"), "--key", str(public)]) == 1
    assert main([*words, "--force"]) == 1
    assert "has been changed since" in capsys.readouterr().err
    shutil.copytree(path, path.with_name("step-00000003"))
    assert main(["verify", str(tmp_path / "run"), "--key", str(public)]) == 1
    assert main(["verify", str(path)]) == 2
    assert "--key is missing" in capsys.readouterr().err
