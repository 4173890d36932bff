"""What a run shows and remembers of itself: the clock, the progress line, the timeline, the report, the log.

All of it watches `phases`, or is told by the loop after a step; nothing here changes what is computed.
"""
