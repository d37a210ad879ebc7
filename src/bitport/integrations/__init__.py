"""Thin shims to other libraries; each is imported only by those who use it."""
