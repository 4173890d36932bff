"""Measure known silent mistakes of distributed training, in Unisono and in other libraries.

    python -m benchmarks.mistakes                                    # Unisono, and DistributedDataParallel by hand
    python -m benchmarks.mistakes --peers /path/to/venv/bin/python   # and the libraries of that Python

Each module measures one mistake. Its function for another library follows that library's documentation with default
settings. torchrun runs it, and needs only torch and that library. The function for Unisono is the public loop. Each
function returns its measurement as a plain value on all processes, and the case has the right value. The table is
`docs/measured/correctness.md`; tests/parity/test_silent_mistakes.py tests our column.
"""
