"""Other people's implementations of algorithms, each brought into one form by one file in this folder.

A file imports its library at its top: where that fails, the reference is missing, and the error says so. It defines

* ``PACKAGES``: the distributions whose versions belong to a result,
* ``SCHEME``, ``ALGORITHM``: what of bitport does the same,
* ``solve(weight, x)``: the weight [n, k] that it makes of ``weight`` on inputs ``x`` [rows, k], dequantized.
"""
