"""Read a command line: targets, flags, run directories, and suggestions for what is wrong with it."""
