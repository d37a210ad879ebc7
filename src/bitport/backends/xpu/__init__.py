"""XPU kernels."""
