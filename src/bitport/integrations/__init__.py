"""Thin adapters to other libraries, each imported only by those who use it."""
