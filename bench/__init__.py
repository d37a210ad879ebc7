"""Measurements: each module is one suite, run as ``python -m bench.<name>``; only ratios inside one run count."""
