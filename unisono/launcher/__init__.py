"""Starting the processes of a run and looking after them until the last one is gone. Nothing in here needs torch."""
