"""Known silent mistakes of distributed training, each as a measurement: ours, and the peers' in processes of their own.

    python -m benchmarks.mistakes                                    # ours, and DistributedDataParallel by hand
    python -m benchmarks.mistakes --peers /path/to/venv/bin/python   # and the peers that are installed there

A file a mistake. Its function for a peer is written as the peer's documentation shows it, with the defaults that a user
gets who sets nothing, and is run by torchrun; only the peer and torch have to be there. Ours is the public loop. Each
returns what it measured, a plain value, on every process; the case knows what is right. The table is
`docs/measured/correctness.md`; tests/parity/test_silent_mistakes.py tests our column.
"""
