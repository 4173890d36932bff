"""Tensor parallel: matrices divided over the processes of an axis."""
