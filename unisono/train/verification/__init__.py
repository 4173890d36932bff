"""Verification: a run checks its own promise while it trains (verification.py has the picture)."""
