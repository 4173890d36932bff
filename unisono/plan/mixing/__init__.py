"""Mixtures: how many samples each step draws from each source, and which ones. Pure functions of numbers."""
