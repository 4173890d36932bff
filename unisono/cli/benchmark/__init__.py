"""The measurements of `unisono bench`, and their report."""
