"""Exchanges that are made of other exchanges: one after the other, one for each pipeline stage, a script's own."""
