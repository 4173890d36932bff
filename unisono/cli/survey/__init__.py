"""`unisono doctor` on several hosts: examine each host and the links between them, and name what is wrong."""
