"""Modules for those who build a layer from (in, out), and the walk that finds what can be quantized."""
