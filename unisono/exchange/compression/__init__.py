"""Compressed gradients: block quantization, top-k and PowerSGD, over the nodes of the tree."""
