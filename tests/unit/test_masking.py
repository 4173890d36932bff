"""Which values are masked: by name, by form, and wherever a known value occurs. And which are not."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from unisono.config import CommandLine
from unisono.errors import SettingsError
from unisono.security.masking import MASK, forget, is_secret, mask_text, mask_words, masked, remember

SECRETS = {
    "api_key": "x",
    "model.API_KEY": "short",
    "apiKey": "short",
    "WANDB_API_KEY": "0123456789abcdef",
    "db.password": "hunter2",
    "DB_PASSWORD": "1234",
    "passphrase": "a b c",
    "HF_TOKEN": "hf-like-token",
    "access_token": "abc",
    "client_secret": "s",
    "aws_secret_access_key": "AbC/1",
    "GOOGLE_CREDENTIALS": "{}x",
    "authorization": "x",
    "service_key": "abcd",
    "my_key": "plantedsecret",
}

NO_SECRETS = {
    "image_key": "jpg",
    "text_key": "text",
    "pad_token": "<pad>",
    "tokenizer": "gpt2-large-tokenizer",
    "max_tokens": "1234567890",
    "key_size": "123456789012",
    "TOKEN_FILE": "/run/secrets/token",
    "SSH_AUTH_SOCK": "/tmp/ssh-1/agent.1",
    "author": "Ada Lovelace",
    "keep_every": "every tenth",
    "monkey": "capuchin-monkey",
    "keyboard": "a-long-keyboard",
    "password": "none",
    "secret": "",
    "PWD": "/home/ada/project",
}


@pytest.mark.parametrize(("name", "value"), SECRETS.items())
def test_a_name_of_a_secret_is_recognized(name: str, value: str) -> None:
    assert is_secret(name, value)
    assert masked(name, value) == MASK
    assert mask_text(f"Invalid value: {name}={value!r}") == f"Invalid value: {name}='{MASK}'"


@pytest.mark.parametrize(("name", "value"), NO_SECRETS.items())
def test_words_of_training_are_no_secrets(name: str, value: str) -> None:
    assert not is_secret(name, value)
    assert masked(name, value) == value
    assert mask_text(f"{name}={value}") == f"{name}={value}"


@pytest.mark.parametrize("value", [3, 2.5, True, None, [1, 2]])
def test_numbers_are_never_masked(value: Any) -> None:
    assert masked("password_token_key", value) == value


FORMS = [
    "https://ada:hunter2@example.org/data",
    "s3://AKIAIOSFODNN7EXAMPLE:wJalrXUtnFEMI@bucket/run",
    "https://bucket/x?X-Amz-Signature=0123abcd&part=1",
    "ghp_0123456789abcdefghijABCDEFGHIJ012345",
    "hf_abcdefghijklmnopqrstuvwxyz",
    "sk-proj-0123456789abcdefghij",
    "xoxb-123456789012-abcdefghijkl",
    "AKIAIOSFODNN7EXAMPLE",
    "Authorization: Bearer abc.def-ghi~jkl",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhZGEifQ.c2lnbmF0dXJl",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1r\n-----END OPENSSH PRIVATE KEY-----",
]
PARTS = ["hunter2", "wJalrXUtnFEMI", "0123abcd", "ghp_", "hf_a", "proj", "xoxb", "AKIA", "abc.def", "eyJ", "b3Blb"]


@pytest.mark.parametrize(("text", "part"), [*zip(FORMS, PARTS, strict=True)])
def test_a_form_of_a_secret_is_recognized_under_any_name(text: str, part: str) -> None:
    assert part in text
    assert part not in mask_text(f"cannot read {text}: status 403")
    assert masked("data", text) != text


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'validation_split'",
        "There is no key: checkpoint",
        "ssh://git@github.com/ada/data.git",
        "http://127.0.0.1:8000/?page=2",
        "--ranks 4 --set batch=64 --run-dir runs/mine",
        "the tree adds 3 = 1 + 2",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert mask_text(text) == text


def test_json_and_flags_in_text() -> None:
    assert mask_text('{"api_key": "abc", "lr": 0.1}') == '{"api_key": "***", "lr": 0.1}'
    assert mask_text("unisono run x.py -- --api-key abc --lr 0.1") == "unisono run x.py -- --api-key *** --lr 0.1"
    assert mask_text("password = 'a \\' b' and more") == "password = '***' and more"


def test_words_of_a_command() -> None:
    words = ["unisono", "run", "x.py", "--set", "api_key=abc", "--set", "lr=0.1"]
    own = ["--", "--password", "a b", "--token=abcdefgh"]
    expected = "unisono run x.py --set api_key=*** --set lr=0.1 -- --password *** --token=***"
    assert mask_words([*words, *own]) == expected.split()
    assert str(CommandLine((*words, *own))) == shlex.join(expected.split())


def test_a_known_value_is_masked_wherever_it_occurs() -> None:
    remember({"SOME_SECRET": "correct horse battery", "HOME": "/home/ada-lovelace", "SHORT_SECRET": "abc"})
    try:
        assert mask_text("no correct horse battery in /home/ada-lovelace, abc") == "no *** in /home/ada-lovelace, abc"
        error = SettingsError("It is correct horse battery.", "api_key=abc", "--set data=https://a:b@c")
        assert "horse" not in str(error)
        assert error.problems[0] == ("It is ***.", "api_key=***", "--set data=https://a:***@c")
        assert "horse" not in repr(error.args)
    finally:
        forget(["correct horse battery"])
