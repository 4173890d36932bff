"""Draw many scripts, run each in several placements, and print what came of them.

    python -m tests.scripts --from 0 --count 2000 --processes 2

A finding is kept in a folder with its script and its placements: other bits under the promise "exact", a crash, a
refusal after the first step. refused.txt there has the messages of the refusals.
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
    """The verdicts, in the order of seeds; `folder` keeps what is to be looked at."""
    with ThreadPoolExecutor(processes) as pool:
        verdicts = pool.map(partial(judge, folder=folder, left_out=tuple(left_out)), seeds)
        for verdict in _until_interrupted(verdicts, pool):
            place = folder / f"seed-{verdict.script.seed}"
            if verdict.kind in KEPT:
                (place / "verdict.txt").write_text(f"{verdict}\n", encoding="utf-8")
            else:
                shutil.rmtree(place)
            if verdict.kind == "refused":  # for reading whether the causes are right
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
    """How many came to what, refusals and lower promises by cause, and the rest by seed."""
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
    parser.add_argument("--processes", type=int, default=2, help="scripts that run at a time")
    parser.add_argument("--with", action="append", default=[], dest="also", help="draw this known case as well")
    parser.add_argument("--keep", type=Path, help="the folder for what is found; a temporary one otherwise")
    parser.add_argument("--seed", type=int, action="append", help="only this one")
    asked = parser.parse_args()
    folder = (asked.keep or Path(tempfile.mkdtemp(prefix="scripts-"))).resolve()
    left_out = set() if "all" in asked.also else set(KNOWN) - set(asked.also)
    seeds = asked.seed or range(asked.first, asked.first + asked.count)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job ignores the first
        signal.signal(number, signal.default_int_handler)
    began, verdicts = time.monotonic(), []
    try:
        for verdict in judge_all(seeds, folder, left_out, asked.processes):
            verdicts.append(verdict)
            if verdict.kind == "finding":
                print(f"seed {verdict.script.seed}: {verdict.cause.splitlines()[0]}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted: the table has what was judged before", file=sys.stderr)
    seconds = time.monotonic() - began
    print(table(verdicts))
    print(f"{len(verdicts)} scripts in {seconds:.0f} s, {seconds / max(1, len(verdicts)):.2f} s each; kept in {folder}")
    return any(verdict.kind == "finding" for verdict in verdicts)


if __name__ == "__main__":
    sys.exit(main())
