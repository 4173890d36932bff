"""What a run promises, and what it refuses."""
