"""Quantization-aware training and training in low precision: the cost of a step, and the resulting quality."""
