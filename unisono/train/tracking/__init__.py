"""Send what a run records to experiment trackers: the process that does it, and its start."""
