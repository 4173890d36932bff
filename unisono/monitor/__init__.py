"""Observe a run: the clock of phases, the progress line, the timeline, the summary, logging, the status of a process.

Modules here observe `phases` or are called after a step. None of them changes what is computed.
"""
