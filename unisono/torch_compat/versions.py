"""The versions of torch that the library has been run with."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from unisono.errors import WorldError

OLDEST = (2, 10)
"""The oldest version whose tests have passed; pyproject.toml has the same number."""


def require_torch() -> None:
    """Raise WorldError if torch is missing or too old. torch is not imported."""
    oldest = ".".join(map(str, OLDEST))
    do = f"pip install 'torch>={oldest}'"
    try:
        found = version("torch")
    except PackageNotFoundError:
        raise WorldError("torch is not installed.", f"Unisono needs torch {oldest} or newer.", do) from None
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    if numbers < OLDEST:
        raise WorldError(f"torch {found} is too old.", f"Unisono needs torch {oldest} or newer.", do)
