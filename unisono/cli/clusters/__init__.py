"""The commands for engines of clusters, one module each."""
