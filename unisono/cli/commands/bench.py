"""unisono bench: measure how fast processes communicate, and name slow links.

The processes measure (cli/benchmark/measure.py), and rank 0 writes each result as a line of a file. From these lines
bench.json and bench.html (cli/benchmark/html_report.py) are made, so results before a Ctrl-C are kept.
"""

from __future__ import annotations

import difflib
import json as json_
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from unisono.cli.benchmark.collective_kinds import KINDS
from unisono.cli.benchmark.html_report import page
from unisono.cli.benchmark.slow_links import MeasuredLink, findings
from unisono.cli.request.host_flags import HostFlags
from unisono.cli.request.restarts import say_line
from unisono.cli.request.run_dir import choose_run_dir, problems_of_run_dir
from unisono.cli.request.run_options import WHAT, WHERE
from unisono.cli.request.suggestions import WHOLE
from unisono.config import CommandLine, plural
from unisono.environment import World
from unisono.errors import Problem, SettingsError
from unisono.launcher import local_launch
from unisono.launcher.hosts.cluster import Cluster
from unisono.launcher.supervisor import RunOutcome

LINES = "measured.jsonl"
"""Results as they are measured; removed when bench.json is written."""

SIZES = "1kB,4kB,16kB,64kB,256kB,1MB,4MB,16MB,64MB"
LARGEST = 2**32
"""The largest size, in bytes. Every process holds several copies of a message."""


def bench(
    *,
    ranks: Annotated[int | None, WHOLE, Parameter(name=["--ranks", "-n"], metavar="N", group=WHERE)] = None,
    only: Annotated[tuple[str, ...], Parameter(negative=(), metavar="NAME", show_default=False, group=WHAT)] = (),
    sizes: Annotated[str, Parameter(metavar="LIST", group=WHAT)] = SIZES,
    run_dir: Annotated[Path | None, Parameter(metavar="DIR", group=WHERE)] = None,
    json: Annotated[bool, Parameter(negative=(), show_default=False, group=WHERE)] = False,
    several: HostFlags = HostFlags(),  # noqa: B008  (frozen)
) -> int:
    """Measure how fast processes communicate, with every collective and between every pair, and name slow links.

    Processes are started on this host or on those of --hosts, or are those of torchrun, srun or mpirun. Writes
    bench.json, and plots to bench.html.

    Parameters
    ----------
    ranks
        Number of processes to start: 2, or the slots of the hosts, by default. Under torchrun and srun it is theirs.
    only
        Measure only this collective, or only `pairs`. Repeatable.
    sizes
        Sizes of the tensors in bytes, as in 1kB,64MB; 1 kB is 1024 bytes.
    run_dir
        The folder for the results. By default runs/bench-TIME.
    json
        Print the results as JSON.
    """
    words = [word for name in only for word in ("--only", name)]
    words += ["--sizes", sizes] if sizes != SIZES else []
    words += ["--ranks", str(ranks)] if ranks is not None else []
    words += ["--run-dir", str(run_dir)] if run_dir is not None else []
    words += several.words
    line = CommandLine(("unisono", "bench", *words, *(["--json"] if json else [])))
    world = World() if several.words else World.current()
    if several.words:
        ranks = int(several.ranks("1" if ranks is None else str(ranks)))
    count, plan = _checked(world, ranks, only, sizes, run_dir, line)
    if world.foreign:
        return _in_this_world(world, plan, run_dir, line, json)
    if several.is_agent:
        return several.serve()
    where = several.places(count)
    cluster = Cluster(where.listed, count, where.connector, say_line) if where is not None else None
    folder = choose_run_dir("bench", run_dir, resume=False, line=line)
    arguments = [str(folder.resolve() / LINES), json_.dumps(plan)]
    script, screen = Path(__file__).parents[1] / "benchmark" / "measure.py", None if json else 1
    try:
        outcome = local_launch.run(
            script, arguments, ranks=count, logs=folder / "log", screen=screen, verbose=not json, cluster=cluster
        )
    except SettingsError:  # nothing was started
        if run_dir is None:
            shutil.rmtree(folder)
        raise
    return _ended(outcome, folder, json, ours=run_dir is None)


def _in_this_world(world: World, plan: Mapping[str, Any], run_dir: Path | None, line: CommandLine, json: bool) -> int:
    """Measure in this process, which is one of those that torchrun or srun started."""
    from unisono.cli.benchmark.measure import measure_in  # here, because it loads torch

    folder = choose_run_dir("bench", run_dir, resume=False, line=line) if world.is_main else None
    measure_in(world, folder / LINES if folder is not None else None, plan, quiet=json)
    return _ended(RunOutcome(0), folder, json, ours=False) if folder is not None else 0


# -- the request


def _checked(
    world: World, ranks: int | None, only: Sequence[str], sizes: str, run_dir: Path | None, line: CommandLine
) -> tuple[int, dict[str, Any]]:
    """Return the number of processes, and what they measure. Raises SettingsError with everything that is wrong."""
    problems: list[Problem] = []
    foreign = world.foreign
    count = world.size if foreign else 2 if ranks is None else ranks
    if foreign and ranks is not None:
        facts = f"{world.launcher} already started {world.size} processes, and these are measured."
        error = f"--ranks cannot be combined with {world.launcher}."
        problems.append(Problem(error, facts, str(line.without("--ranks"))))
    elif count < 2:
        error = f"There {'is' if count == 1 else 'are'} {plural(count, 'process', 'processes')}."
        do = "torchrun --nproc-per-node 2 ..." if foreign else str(line.flag("--ranks", "2"))
        problems.append(Problem(error, "A benchmark of communication needs at least 2.", do))
    names = [*KINDS, "pairs"]
    for name in only:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1, 0.5)
            facts = f"The nearest name is {near[0]}." if near else f"The collectives are {', '.join(names)}."
            do = str(line.flag("--only", (near or names)[0], instead_of=name))
            problems.append(Problem(f"There is no collective {name}.", facts, do))
    found = [_bytes_of(text) for text in sizes.split(",")]
    if None in found or any(not 4 <= n <= LARGEST for n in found if n is not None):
        bad = next(t for t, n in zip(sizes.split(","), found, strict=True) if n is None or not 4 <= n <= LARGEST)
        facts = "A size is 4 bytes to 4 GB, as in 1kB, 64MB or 4096."
        problems.append(Problem(f"Invalid size in --sizes: {bad}", facts, str(line.flag("--sizes", "1kB,1MB,64MB"))))
    if world.is_main:
        problems += problems_of_run_dir("bench", run_dir, resume=False, line=line)
        if run_dir is not None and (run_dir / "bench.json").exists():
            do = str(line.flag("--run-dir", f"{run_dir}-2"))
            problems.append(Problem(f"{run_dir} already contains results.", "It has a bench.json.", do))
    if problems:
        raise SettingsError.of(problems)
    return count, {"names": list(dict.fromkeys(only)) or names, "sizes": sorted({n for n in found if n is not None})}


def _bytes_of(text: str) -> int | None:
    """Parse 64MB, 64 MB, 64M or 67108864; return None for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgG]?)i?[bB]?\s*", text)
    return round(float(match[1]) * 1024 ** " kmg".index(match[2].lower() or " ")) if match else None


# -- the results


def _ended(outcome: RunOutcome, folder: Path, json: bool, *, ours: bool) -> int:
    """Write the results, and return the exit status. `ours`: the folder was created for them."""
    found = collected(folder / LINES, stopped=outcome.stopped or outcome.failure is not None)
    if outcome.failure is not None:
        record = outcome.failure.record
        if json:
            message = record.message if record else str(outcome.failure)
            print(json_.dumps({"error": {"exit_status": outcome.exit_status, "message": message, "dir": str(folder)}}))
        return outcome.exit_status
    if not found["collectives"] and not found["pairs"]:
        if ours:
            shutil.rmtree(folder)
        print(json_.dumps({"stopped": True, "dir": None}) if json else "Stopped before anything was measured.")
        return outcome.exit_status
    (folder / "bench.json").write_text(json_.dumps(found, indent=1) + "\n", encoding="utf-8")
    (folder / "bench.html").write_text(page(found), encoding="utf-8")
    (folder / LINES).unlink()
    if json:
        print(json_.dumps({**found, "dir": str(folder)}))
        return outcome.exit_status
    for finding in found["findings"]:
        print(f"\n{finding}")
    what = "Stopped; results so far" if found["stopped"] else "Results and plots"
    print(f"\n{what}: {shlex.quote(str(folder / 'bench.html'))}")
    return outcome.exit_status


def collected(file: Path, *, stopped: bool) -> dict[str, Any]:
    """Return the results in the lines of a file, and the findings about slow links."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = [json_.loads(line) for line in lines if line.endswith("}")]  # the last line may be cut off
    about: dict[str, Any] = next((row["about"] for row in rows if "about" in row), {})
    pairs = [row for row in rows if "ranks" in row]
    links = [MeasuredLink(tuple(row["ranks"]), row["latency_seconds"], row["bytes_per_second"]) for row in pairs]
    return {
        "about": about,
        "stopped": stopped,
        "collectives": [row for row in rows if "collective" in row],
        "pairs": pairs,
        "findings": [str(finding) for finding in findings(links, about.get("hosts", []))],
    }
