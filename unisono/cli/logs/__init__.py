"""Read the logs of all ranks of a run, merged by time."""
