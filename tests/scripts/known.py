"""Cases in which a run is known to promise exact bits and to miss them, and that are being mended elsewhere.

The generator leaves out what stands here, so that every other difference is new. To draw a case again, remove its line,
or name it: `python -m tests.scripts --with sparse`.
"""

from __future__ import annotations

KNOWN: dict[str, str] = {}
"""Name of a trait of a script (or of a trait with a placement): what goes wrong."""
