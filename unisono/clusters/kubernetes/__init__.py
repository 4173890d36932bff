"""Manifests for Kubernetes: an Indexed Job or a JobSet, and what its pods need beside it."""
