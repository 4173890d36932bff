"""Metrics for operators: the numbers of a run on a page that Prometheus reads. No torch."""
