"""Evaluation and prediction over a data set, on all processes."""
