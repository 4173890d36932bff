"""unisono shards: write shards from a folder."""
