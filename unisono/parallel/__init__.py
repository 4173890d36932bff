"""Parallel layouts: which device holds which part of a model, and how it computes."""
