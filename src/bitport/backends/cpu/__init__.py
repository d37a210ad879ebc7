"""CPU kernels."""
