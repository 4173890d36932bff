"""Population-based training: members copy the state of better ones, and perturb their settings while they train."""
