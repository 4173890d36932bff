"""Batch inference with a trained run, for `unisono predict`."""

SUFFIXES = (".jsonl", ".safetensors")
"""The formats of an output: lines of JSON, or tensors."""
