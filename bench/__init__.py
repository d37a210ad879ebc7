"""Benchmarks: each module is one suite, run as ``python -m bench.<name>``; only ratios within one run are
meaningful."""
