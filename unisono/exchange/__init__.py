"""Exchanges: how the processes of a run average their gradients. config/exchanges.py lists them."""
