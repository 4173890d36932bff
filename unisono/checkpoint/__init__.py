"""Checkpoints: the state between two steps, on disk, whole or not at all."""
