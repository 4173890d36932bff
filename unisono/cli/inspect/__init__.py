"""The verbs that look at a run: its report, its live page, its ranks in the terminal."""
