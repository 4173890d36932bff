"""Measure what the steps of a script take: memory by part, and the time of each part of a step (`unisono plan`)."""
