"""Exchanges: how the processes of a run average their gradients. config/exchange_registry.py lists them."""
