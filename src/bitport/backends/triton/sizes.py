"""Whole numbers on the host's side. Triton's functions for them serve kernels too, and take ten times as long."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power(n: int) -> int:
    """The smallest power of two that is at least n, and 1."""
    return 1 << max(0, n - 1).bit_length()
