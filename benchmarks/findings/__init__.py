"""Planted bottlenecks: whether they are found, and whether the advice saves what it promises."""
