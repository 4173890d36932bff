"""The report of a run: read its files, find what slows it down, and show it as text or as a page."""
