"""Check that transformers is installed, in a version that has what is used here, with the line to type if it is not."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from unisono.errors import SettingsError

LEAST = {"transformers": (5, 23), "accelerate": (1, 1)}
"""The oldest versions: functions for loading move between versions. TrainingArguments need accelerate."""


def require_transformers() -> None:
    """Raise SettingsError if transformers or accelerate is missing, or older than LEAST."""
    wrong = []
    for name, least in LEAST.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            wrong.append(f"{name} is not installed")
            continue
        if tuple(map(int, re.findall(r"\d+", found)[:2])) < least:
            wrong.append(f"{name} is {found}, and {'.'.join(map(str, least))} or newer is needed")
    if wrong:
        raise SettingsError(
            "unisono.integrations.transformers needs other packages.",
            f"{'; '.join(wrong)}.",
            "pip install --upgrade 'unisono[hf]'",
        )


require_transformers()
