"""Predict what placements of a run take, from what a few steps on one process took. Numbers only, without torch."""
