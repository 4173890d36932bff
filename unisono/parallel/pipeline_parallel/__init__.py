"""Pipeline parallel: the layers of a model divided into stages."""
