"""Record a profile of some steps (`profile.steps`). Files and tables of profiles are in unisono/profiles/."""
