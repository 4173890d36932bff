"""Tensors as bytes: their specs, rows of them, values that contain them, and their digests. No processes here."""
