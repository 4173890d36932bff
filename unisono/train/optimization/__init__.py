"""Gradient norms and optimizer steps that have the same bits on shards as on whole parameters."""
