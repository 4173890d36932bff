"""Processes on several hosts: one connection to an agent on each host, which starts and supervises processes there."""
