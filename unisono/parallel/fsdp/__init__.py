"""Fully sharded data parallel (FSDP2), with the bits of one process."""
