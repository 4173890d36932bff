"""The promise of a run, and the errors that it reports."""
