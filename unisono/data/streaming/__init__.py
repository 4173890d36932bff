"""Streams: sharded data sets that are read sample by sample, from files or URLs."""
