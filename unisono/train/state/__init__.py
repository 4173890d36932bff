"""The state of a run: what checkpoints hold, and how a resume restores it."""
