"""Print the reference pages of the docs as Markdown: `python -m unisono.cli.reference settings` or `commands`.

Both come from the declarations that the command itself uses, and neither loads torch.
"""

from __future__ import annotations

import sys

from unisono.cli.main import build_app
from unisono.cli.request.settings_help import markdown


def settings_reference() -> str:
    """Return a table of name, type, default and meaning for each section of the settings."""
    return markdown()


def command_reference() -> str:
    """Return the verbs of the command with their arguments and flags."""
    return str(build_app().generate_docs())


PAGES = {"settings": settings_reference, "commands": command_reference}


def main() -> int:
    """Print the page that the command line names."""
    if len(sys.argv) != 2 or sys.argv[1] not in PAGES:
        print(f"usage: python -m unisono.cli.reference {{{','.join(PAGES)}}}", file=sys.stderr)
        return 2
    print(PAGES[sys.argv[1]]())
    return 0


if __name__ == "__main__":
    sys.exit(main())
