"""Experiment trackers: send the numbers of a run to CSV files, TensorBoard, or a tracker of one's own."""
