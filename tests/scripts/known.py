"""Known cases in which a run promises exact bits and breaks the promise.

The generator leaves these traits out, so that each difference is a new one. To include a case, remove its line or pass
its name: `python -m tests.scripts --with sparse`.
"""

from __future__ import annotations

KNOWN: dict[str, str] = {}
"""A description of the error by the trait of a script, or of a script under a layout."""
