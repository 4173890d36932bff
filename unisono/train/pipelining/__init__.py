"""Steps, states and evaluation of a model whose layers are divided into pipeline stages."""
