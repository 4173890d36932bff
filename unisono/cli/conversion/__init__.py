"""unisono convert."""
