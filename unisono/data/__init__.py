"""Data: what each virtual rank sees, fetched by torch's DataLoader."""
