"""`python -m unisono` is the command `unisono`, for environments whose bin folder is not on the path."""

from __future__ import annotations

import sys

from unisono.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
