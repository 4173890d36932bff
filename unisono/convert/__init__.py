"""Rewrite training scripts of other libraries into scripts of Unisono, by their syntax trees (libcst)."""
