"""Find the other processes of a run: stores, host names, and connecting the process group."""
