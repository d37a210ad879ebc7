"""Schemes and algorithms on a published language model and real English text: docs/accuracy-real.md."""
