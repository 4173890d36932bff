"""Benchmarks on a GPU: `make gpu` runs all of them and writes benchmarks/GPU.md."""
