"""The micro-batches of a step: those of this process, slices of sequences, and extra rounds that do not count."""
