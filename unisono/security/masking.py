"""Which texts are secrets, and text without them.

A value is a secret if its name says so (`api_key`, `DB_PASSWORD`), if its form says so (`https://ada:hunter2@host`,
tokens of known services, private keys), or if a variable of the environment or a setting with such a name has it:
`remember` collects these values. `***` stands for it in every file and message.

Names with only KEY, TOKEN or AUTH also occur in training (`image_key="jpg"`, `pad_token="<pad>"`, `max_tokens=512`). So
their values count from 8 characters on, and numbers never.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

MASK = "***"

PLAIN = frozenset(["", MASK, "none", "null", "true", "false", "value", "..."])
"""Values that are no secret under any name."""

STRONG = frozenset(
    [
        *("password", "passwd", "passphrase", "pwd", "secret", "secrets", "credential", "credentials"),
        *("authorization", "bearer", "apikey", "accesskey", "secretkey", "privatekey", "authtoken", "accesstoken"),
    ]
)
"""Words that make a name one of a secret."""

WEAK = frozenset(["key", "keys", "token", "tokens", "auth", "cookie"])
"""Words that do so if the value is long enough."""

BEFORE_KEY = frozenset(
    [
        *("api", "access", "secret", "private", "signing", "encryption", "license", "account", "deploy", "master"),
        *("auth", "bearer", "refresh", "session", "personal", "bot", "client", "service"),
    ]
)
"""Words before KEY or TOKEN that make the name one of a secret, however short the value is."""

ABOUT = frozenset(
    [
        *("path", "file", "sock", "dir", "folder", "name", "type", "method", "host", "user", "size", "count", "dim"),
        *("length", "len", "index", "padding", "heads", "ids", "timeout", "seconds", "every", "required"),
    ]
)
"""Last words of names that describe a secret and do not hold it: TOKEN_FILE, key_size."""

LEAST = 8
"""Characters of a secret whose name has only a weak word, and of one that is replaced wherever it occurs."""

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

FORMS = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S),
    re.compile(r"(?<=://)(?P<kept>[^/\s:@'\"]*:)[^/\s@'\"]+(?=@)"),  # RFC 3986, userinfo
    re.compile(r"(?P<kept>[?&](?:X-Amz-(?:Signature|Credential|Security-Token)|sig|signature)=)[^&\s'\"]+"),
    re.compile(r"(?P<kept>\b(?:Bearer|Basic) +)[\w.~+/=-]{8,}"),  # RFC 6750, RFC 7617
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),  # RFC 7519, a JSON web token
    re.compile(r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|npm_|pypi-|dckr_pat_|nvapi-)[\w-]{16,}"),
    re.compile(r"\bsk-[\w-]{16,}"),
    re.compile(r"\bxox[abeoprs]-[\w-]{10,}"),
    re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    re.compile(r"\bAIza[\w-]{35}"),
    re.compile(r"\bya29\.[\w-]{16,}"),
)
"""Forms of secrets under any name; what `kept` matches stays."""

QUOTED = r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"
ASSIGNED = re.compile(rf"(?P<name>[A-Za-z_][\w.-]*)(?P<sign> ?= ?)(?P<value>{QUOTED}|[^\s'\",;&)\]}}]+)")
IN_JSON = re.compile(rf"(?P<quote>[\"'])(?P<name>[\w.-]+)(?P=quote)(?P<sign>\s*:\s*)(?P<value>{QUOTED})")
FLAG = re.compile(rf"(?P<name>--[A-Za-z][\w-]*)(?P<sign> +)(?P<value>{QUOTED}|[^\s'\"-][^\s'\"]*)")

_known: set[str] = set()


def remember(values: Mapping[str, Any]) -> None:
    """Remember the values of secret names, to mask them wherever they occur in this process.

    Args:
        values: The values by name, as those of the environment.
    """
    for name, value in values.items():
        if isinstance(value, str) and len(value) >= LEAST and is_secret(name, value):
            _known.add(value)


def is_secret(name: str, value: str) -> bool:
    """Return whether a text is a secret, by its name."""
    if value.strip().lower() in PLAIN or name == "PWD":  # the working folder, under POSIX
        return False
    words = [word.lower() for word in WORD.findall(name.rpartition(".")[2])]
    if not words or words[-1] in ABOUT:
        return False
    if STRONG & {*words}:
        return True
    if not WEAK & {*words}:
        return False
    if any(first in BEFORE_KEY and second in WEAK for first, second in pairwise(words)):
        return True
    return len(value) >= LEAST and not _is_number(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def masked(name: str, value: Any) -> Any:
    """Return a value without secrets: a text, or a list or dictionary of them. Others are returned as they are."""
    if isinstance(value, str):
        return MASK if is_secret(name, value) else mask_text(value)
    if isinstance(value, list | tuple):
        return [masked(name, each) for each in value]
    if isinstance(value, dict):
        return {key: masked(str(key), each) for key, each in value.items()}
    return value


def is_masked(value: Any) -> bool:
    """Return whether a value from a file stands for a secret that the file does not contain."""
    if isinstance(value, list | tuple):
        return any(map(is_masked, value))
    return isinstance(value, str) and MASK in value


def mask_forms(text: str) -> str:
    """Return a text without remembered values and without what has the form of a secret: for the lines of a program."""
    for value in sorted(_known, key=len, reverse=True):
        text = text.replace(value, MASK)
    for form in FORMS:
        text = form.sub(_without, text)
    return text


def mask_text(text: str) -> str:
    """Return a text without secrets: also `api_key=...`, `"password": "..."` and `--token ...`."""
    text = mask_forms(text)
    for pattern in (ASSIGNED, IN_JSON, FLAG):
        text = pattern.sub(_masked_match, text)
    return text


def _without(match: re.Match[str]) -> str:
    return match.groupdict().get("kept", "") + MASK


def _masked_match(match: re.Match[str]) -> str:
    """Return an assignment with its value masked, if that is a secret. Quotes stay."""
    found, value = match[0], match["value"]
    quote = value[0] if value[0] in "\"'" else ""
    inner = value[1:-1] if quote else value
    if not is_secret(match["name"], inner):
        return found
    start = match.start("value") - match.start()
    return f"{found[:start]}{quote}{MASK}{quote}{found[start + len(value) :]}"


def mask_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command without secrets: `--set api_key=...`, `--api-key ...`, `--api-key=...`."""
    found: list[str] = []
    flag = ""  # the flag before this word
    for word in words:
        name, equals, value = word.partition("=")
        if equals and is_secret(name, value):
            word = f"{name}={MASK}"
        elif flag and not word.startswith("-") and is_secret(flag, word):
            word = MASK
        else:
            word = mask_text(word)
        found.append(word)
        flag = word if word.startswith("--") and not equals else ""
    return found


def forget(values: Iterable[str]) -> None:
    """Forget remembered values, as those of a test."""
    _known.difference_update(values)
