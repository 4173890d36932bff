"""The modules of a run: parameters, buffers and Python attributes, kept equal on all processes."""
