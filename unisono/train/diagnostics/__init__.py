"""Compare runs and processes: traces, dumps, replays, divergence, redundant computation."""
