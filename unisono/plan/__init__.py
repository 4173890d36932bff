"""The score: what a step computes, as numbers. Nothing here knows torch, processes, or where anything runs."""
