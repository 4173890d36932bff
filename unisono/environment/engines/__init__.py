"""Readers of the variables of launchers and schedulers, one file for each (readers.py has their order)."""
