"""Run a script again or several ways, and compare traces and tensors."""
