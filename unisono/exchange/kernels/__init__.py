"""The elementwise work of exchanges: torch's operations, and Triton kernels that save passes over a GPU's memory."""
