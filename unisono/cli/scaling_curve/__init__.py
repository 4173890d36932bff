"""`unisono scale`: measure speed-up and efficiency of several processes, and the parts of a step that cost them."""
