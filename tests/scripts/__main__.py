"""Generate random scripts, run each under several layouts, and print a summary.

    python -m tests.scripts --from 0 --count 2000 --processes 2

The folder keeps each finding with its script and layouts: different bits under the promise "exact", a crash, or a
refusal after the first step. refused.txt has the messages of all refusals.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.scripts.known import KNOWN
from tests.scripts.verdict import Verdict, judge

KEPT = ("finding", "unseen", "invalid")


def judge_all(seeds: Iterable[int], folder: Path, left_out: Iterable[str], processes: int) -> Iterator[Verdict]:
    """Yield verdicts in the order of seeds. `folder` keeps the scripts that need inspection."""
    with ThreadPoolExecutor(processes) as pool:
        verdicts = pool.map(partial(judge, folder=folder, left_out=tuple(left_out)), seeds)
        for verdict in _until_interrupted(verdicts, pool):
            place = folder / f"seed-{verdict.script.seed}"
            if verdict.kind in KEPT:
                (place / "verdict.txt").write_text(f"{verdict}\n", encoding="utf-8")
            else:
                shutil.rmtree(place)
            if verdict.kind == "refused":  # to review the reasons
                with (folder / "refused.txt").open("a", encoding="utf-8") as file:
                    file.write(f"{verdict}\n\n")
            yield verdict


def _until_interrupted(verdicts: Iterator[Verdict], pool: ThreadPoolExecutor) -> Iterator[Verdict]:
    try:
        yield from verdicts
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def table(verdicts: Iterable[Verdict]) -> str:
    """Format the number of each kind of verdict, with causes of refusals and lowered promises, and seeds of others."""
    kinds: Counter[str] = Counter()
    causes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    seeds: defaultdict[str, list[int]] = defaultdict(list)
    for verdict in verdicts:
        kind = f"{verdict.kind}, wrong on purpose" if verdict.script.broken else verdict.kind
        kinds[kind] += 1
        seeds[kind].append(verdict.script.seed)
        causes[kind][verdict.cause.partition("\n")[0][:160]] += 1
    lines = []
    for kind, count in kinds.most_common():
        lines.append(f"{count:6} {kind}")
        if kind.startswith(("refused", "lowered", "noticed")):
            lines += [f"       {n:5} {cause}" for cause, n in causes[kind].most_common()]
        elif not kind.startswith("exact"):
            lines.append(f"             seeds {', '.join(map(str, seeds[kind]))}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scripts", description=__doc__)
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2, help="number of scripts that run at a time")
    parser.add_argument("--with", action="append", default=[], dest="also", help="include this known case")
    parser.add_argument("--keep", type=Path, help="folder for findings (default: a temporary one)")
    parser.add_argument("--seed", type=int, action="append", help="only this seed")
    args = parser.parse_args()
    folder = (args.keep or Path(tempfile.mkdtemp(prefix="scripts-"))).resolve()
    left_out = set() if "all" in args.also else set(KNOWN) - set(args.also)
    seeds = args.seed or range(args.first, args.first + args.count)
    for number in (signal.SIGINT, signal.SIGTERM):  # background jobs of a shell ignore SIGINT by default
        signal.signal(number, signal.default_int_handler)
    start, verdicts = time.monotonic(), []
    try:
        for verdict in judge_all(seeds, folder, left_out, args.processes):
            verdicts.append(verdict)
            if verdict.kind == "finding":
                print(f"seed {verdict.script.seed}: {verdict.cause.splitlines()[0]}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted: the table has the verdicts so far", file=sys.stderr)
    seconds = time.monotonic() - start
    print(table(verdicts))
    print(f"{len(verdicts)} scripts in {seconds:.0f} s, {seconds / max(1, len(verdicts)):.2f} s each; kept in {folder}")
    return any(verdict.kind == "finding" for verdict in verdicts)


if __name__ == "__main__":
    sys.exit(main())
