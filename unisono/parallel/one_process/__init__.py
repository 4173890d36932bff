"""Several devices of one process: layers divided among them, or one replica on each."""
