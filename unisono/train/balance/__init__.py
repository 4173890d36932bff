"""Load balancing: move virtual ranks to faster processes. No bit of the result depends on it."""
