"""Modes of the files of a run, secrets in texts, and a record that shows every change."""
