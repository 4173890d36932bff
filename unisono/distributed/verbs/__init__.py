"""The parts of the collectives for scripts (../collectives.py): checks of calls, messages, sub-groups."""
