"""Programs that build the project's documentation."""
