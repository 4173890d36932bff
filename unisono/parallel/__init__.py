"""How a model lies over devices, and what it computes with."""
