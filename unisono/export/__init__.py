"""Files with a run's weights that other programs load."""
