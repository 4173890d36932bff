"""unisono speedup: try other kernels on a few steps of a script, and compare step time, memory and bits."""
