"""The learning-rate range test: train with rates that grow, and find where the loss falls fastest."""
