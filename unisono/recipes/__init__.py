"""Whole training scripts to run, to read and to copy. A recipe uses the public names of `unisono` and nothing else."""
