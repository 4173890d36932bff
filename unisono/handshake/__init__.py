"""Prove that both ends of a connection belong to the same run, before a byte of it is parsed. No torch."""
