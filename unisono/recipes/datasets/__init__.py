"""Loaders of the recipes' data sets. Each has a one-line summary with its source, size, license and digest."""
