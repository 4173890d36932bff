"""Engines of clusters that start a run for you: what `unisono kubernetes` and its like hand to them."""
