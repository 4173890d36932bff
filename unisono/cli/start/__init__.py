"""Start a run: where it is kept, what it resumes, and what it prints first."""
