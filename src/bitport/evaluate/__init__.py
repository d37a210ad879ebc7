"""How good a model is: perplexity, distance from the original, size and speed, of one model or of several."""

from bitport.evaluate.divergence import Divergence, divergence
from bitport.evaluate.perplexity import Perplexity, perplexity

__all__ = ["Divergence", "Perplexity", "divergence", "perplexity"]
