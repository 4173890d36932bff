"""Elastic membership: detect a lost peer, agree on the remaining processes, and form a new group."""
