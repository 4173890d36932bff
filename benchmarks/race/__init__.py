"""Compare plain torch, other libraries and Unisono with the same model, data, precision, threads and batch.

arms.py     how each library trains, as its documentation advises
laps.py     all arms in the same processes: seconds per step
alone.py    one arm in new processes: seconds to the first step, memory
__main__.py starts both and writes RESULTS.md
"""
