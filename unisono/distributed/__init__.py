"""The world of a run: its processes, how they come together and part, and the few collectives everybody uses."""
