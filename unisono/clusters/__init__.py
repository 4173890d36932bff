"""Requests for the schedulers of clusters, one folder for each engine. No torch."""
