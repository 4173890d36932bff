"""The command. One file a verb; nothing here loads torch before a verb needs it."""
