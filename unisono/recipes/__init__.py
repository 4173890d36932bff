"""Complete training scripts to run, read and copy. Recipes use only the public names of `unisono`."""
