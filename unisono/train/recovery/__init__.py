"""Recovery of a step after the death of a process."""
