"""Training for quantized models and in low precision: what a step costs, and what it brings."""
