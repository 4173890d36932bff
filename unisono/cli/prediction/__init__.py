"""`unisono predict`."""
