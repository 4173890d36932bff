"""The race: the same model, data, precision, threads and batch through plain torch, its peers and ours, in turns.

arms.py     how each of them trains, as its documentation advises
laps.py     all of them in the same processes, turn by turn: seconds a step
alone.py    one of them in new processes: seconds to the first step, memory
__main__.py starts both, and writes RESULTS.md
"""
