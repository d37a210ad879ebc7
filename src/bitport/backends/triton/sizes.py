"""Integer helpers for the host. Triton's own functions also work in kernels, but take ten times as long."""


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def next_power(n: int) -> int:
    """Return the smallest power of two that is at least n and at least 1."""
    return 1 << max(0, n - 1).bit_length()
