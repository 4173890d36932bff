"""Other kernels for the computation of a model: compiled, channels_last, float8, a back end of attention."""
