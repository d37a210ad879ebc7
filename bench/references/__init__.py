"""Reference implementations of algorithms by others, each adapted to a common form by one file in this folder.

A file imports its library at the top: if that fails, the reference is missing, and the error says so. It defines

* ``PACKAGES``: the distributions whose versions are recorded with a result,
* ``SCHEME``, ``ALGORITHM``: the equivalent in bitport,
* ``solve(weight, x)``: the result [n, k] for ``weight`` with inputs ``x`` [rows, k], dequantized.
"""
