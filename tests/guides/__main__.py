"""Count the commands of the pages, or follow one page and print what its commands print.

python -m tests.guides                                         how many are typed, and why others are not
python -m tests.guides docs/guide/situations/spot.md           its commands, with status, time and output
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.guides.machines import follow
from tests.guides.not_run import why_not
from tests.guides.page_commands import commands, pages


def count() -> None:
    """Print how many commands are typed, and the reasons of the others."""
    known = [command for page in pages() for command in commands(page)]
    reasons = Counter(why_not(command) for command in known)
    print(f"{len(known)} commands on {len({c.page for c in known})} pages; {reasons.pop(None, 0)} are typed.")
    for reason, number in reasons.most_common():
        print(f"{number:4}  {reason}")


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes of a page end, too
    if len(sys.argv) == 1:
        count()
    for page in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            found = follow(page, Path(folder))
        for each in found.typed:
            print(
                f"{each.command.host}$ {each.command.text}\n{each.output}[status {each.status}, {each.seconds:.1f} s]"
            )
        print(*found.problems, sep="\n\n")


if __name__ == "__main__":
    main()
