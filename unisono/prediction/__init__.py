"""Batch inference with a trained run, for `unisono predict`."""
