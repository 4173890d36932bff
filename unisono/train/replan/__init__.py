"""Replan a run while it trains: measure ways to compute the same bits, and use those that take less time."""
