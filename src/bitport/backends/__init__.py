"""Kernels and layouts, one folder per device. README.md in this folder says what a backend may do."""
