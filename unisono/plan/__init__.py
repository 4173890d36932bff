"""Planning: what a step computes, and which process computes it, as numbers. No torch, no processes."""
