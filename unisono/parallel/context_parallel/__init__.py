"""Context parallel: sequences divided over the processes of an axis."""
