"""Orders of samples that are no plain shuffle: data in shards, and batches of similar length."""
