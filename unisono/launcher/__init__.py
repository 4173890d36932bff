"""Start the processes of a run on this host and supervise them until the last one has ended. No torch."""
