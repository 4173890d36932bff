"""The tree exchange: gradients are added along one fixed binary tree, on any number of processes."""
