"""Packing: which parts of samples make up a block of fixed length. Pure functions of lengths."""
