"""Micro-batches that are replayed as CUDA graphs, for steps in which launching kernels takes most of the time."""
