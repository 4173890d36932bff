"""Profiles of some steps of a run: what is recorded, the files, one trace of all ranks, and tables for people."""
