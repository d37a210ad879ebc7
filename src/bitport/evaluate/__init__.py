"""Evaluate one or several models: perplexity, distance from the original, size and speed."""

from bitport.evaluate.divergence import Divergence, divergence
from bitport.evaluate.perplexity import Perplexity, perplexity

__all__ = ["Divergence", "Perplexity", "divergence", "perplexity"]
