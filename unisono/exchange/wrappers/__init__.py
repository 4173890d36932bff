"""Exchanges that are made of others: in sequence, for each pipeline stage, or from a script."""
